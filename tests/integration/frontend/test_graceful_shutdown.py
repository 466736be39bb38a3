"""How a stopping coordinator treats the requests that run, seen by clients of a real cluster."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx2

from baton.pb import generation_pb2 as pb
from baton.pb.generation_pb2_grpc import GenerationStub
from tests.cluster import Cluster
from tests.integration.frontend.frontend_harness import await_grpc_error

COORDINATOR = "coordinator"


def request_body(tokens: int, *, stream: bool = True) -> dict[str, Any]:
    return {"prompt": [1, 2, 3], "max_tokens": tokens, "stream": stream, "ignore_eos": True}


async def test_shutdown_finishes_short_requests_and_ends_the_rest_with_an_error(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {
        "engine": "paced",
        "paced_step_ms": 20.0,
        "drain_timeout": 4.0,
        "max_model_len": 1024,
    }
    async with Cluster(tmp_path, prefill=1, decode=1, **settings) as cluster:
        await cluster.arm_failpoints("decode", "decode.step.before=delay(0.5)")  # until all run
        url = f"{cluster.http_url}/v1/completions"
        async with (
            httpx2.AsyncClient(timeout=100) as http,
            grpc.aio.insecure_channel(cluster.grpc_address) as channel,
            http.stream("POST", url, json=request_body(900)) as long,
            http.stream("POST", url, json=request_body(20)) as short,
        ):
            unary = asyncio.create_task(http.post(url, json=request_body(900, stream=False)))
            call = GenerationStub(channel).Generate(
                pb.GenerateRequest(token_ids={"ids": [1]}, max_tokens=900)
            )
            await cluster.wait_status(lambda status: status.running == 4)
            await cluster.arm_failpoints("decode", "")
            cluster.terminate(COORDINATOR)
            texts = await asyncio.gather(long.aread(), short.aread())
            refused = await unary
            failed = await await_grpc_error(call)
        assert await cluster.wait_for_exit(COORDINATOR) == 0
        *_, last = [line for line in texts[0].split(b"\n\n") if line]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "draining"
        assert texts[1].endswith(b"data: [DONE]\n\n")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["retry-after"] == "5"
        assert failed.code() is grpc.StatusCode.UNAVAILABLE
