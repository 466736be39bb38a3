"""How a stopping coordinator treats the requests that run, seen by clients of a real cluster."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from baton.pb import generation_pb2 as pb
from baton.pb.generation_pb2_grpc import GenerationStub
from tests.cluster import Cluster
from tests.integration.front_fixtures import grpc_error

COORDINATOR = "coordinator"


def ask(tokens: int, *, stream: bool = True) -> dict[str, Any]:
    return {"prompt": [1, 2, 3], "max_tokens": tokens, "stream": stream, "ignore_eos": True}


@pytest.mark.timeout(120)
async def test_those_that_can_end_do_and_the_rest_hear_why(tmp_path: Path) -> None:
    settings = {"engine": "paced", "paced_step_ms": 20.0, "drain_timeout": 4.0, "max_model_len": 1024}
    async with Cluster(tmp_path, prefill=1, decode=1, **settings) as cluster:
        await cluster.arm("decode", "decode.step.before=delay(0.5)")  # until all run
        url = f"{cluster.http}/v1/completions"
        async with (
            httpx.AsyncClient(timeout=100) as http,
            grpc.aio.insecure_channel(cluster.grpc) as channel,
            http.stream("POST", url, json=ask(900)) as long,
            http.stream("POST", url, json=ask(20)) as short,
        ):
            unary = asyncio.create_task(http.post(url, json=ask(900, stream=False)))
            call = GenerationStub(channel).Generate(pb.GenerateRequest(token_ids={"ids": [1]}, max_tokens=900))
            await cluster.wait_status(lambda status: status.running == 4)
            await cluster.arm("decode", "")
            cluster.terminate(COORDINATOR)
            texts = await asyncio.gather(long.aread(), short.aread())
            refused = await unary
            failed = await grpc_error(call)
        assert await cluster.ended(COORDINATOR) == 0
        *_, last = [line for line in texts[0].split(b"\n\n") if line]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "draining"
        assert texts[1].endswith(b"data: [DONE]\n\n")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert failed.code() is grpc.StatusCode.UNAVAILABLE
