"""A real model, its nodes changing role under requests: every token is the one that Hugging Face
gives."""

import asyncio
from pathlib import Path
from typing import Any

from baton.pb import cluster_pb2 as pb
from tests.cluster import Cluster
from tests.grpc_calls import call_cluster_service
from tests.models import build_model, find_stable_prompts

OUTPUT_TOKENS = 32


async def test_tokens_equal_transformers_during_ratio_changes(tmp_path: Path) -> None:
    folder = build_model("llama", tmp_path)
    asked = find_stable_prompts(folder, (17, 40, 130), OUTPUT_TOKENS)
    settings: dict[str, Any] = {
        "dtype": "float32",
        "threads": "1",
        "heartbeat": 0.1,
        "silence": 30.0,
        "flip_timeout": 0.5,
    }
    made = Cluster(tmp_path, model=str(folder), prefill=1, decode=2, **settings)
    async with made as cluster:
        await cluster.wait_status(lambda status: len(status.nodes) == 3)
        over = asyncio.Event()
        served = 0

        async def lane(number: int) -> None:
            nonlocal served
            while not over.is_set():
                answer = await cluster.generate(
                    asked[number].prompt, max_tokens=OUTPUT_TOKENS, temperature=0.0, deadline=60.0
                )
                assert answer.tokens == asked[number].reference_tokens
                served += 1

        async with asyncio.TaskGroup() as lanes:
            for number in range(len(asked)):
                lanes.create_task(lane(number))
            for prefill, decode in ((2, 1), (1, 2), (2, 1)):
                request = pb.SetRatioRequest(prefill=prefill, decode=decode)
                await call_cluster_service(cluster.grpc_address, "SetRatio", request)
                await cluster.wait_status(lambda status: status.ratio.settled, within=60.0)
                before = served
                async with asyncio.timeout(60):
                    while served < before + len(asked):
                        await asyncio.sleep(0.02)
            over.set()
        await cluster.wait_idle()
    made.assert_clean()
