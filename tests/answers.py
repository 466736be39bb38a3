"""The gRPC calls of a test, over a channel each, so that nothing is bound to an event loop."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from baton.pb import cluster_pb2_grpc, common_pb2, generation_pb2, generation_pb2_grpc

OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 250),
)
Call = Any  # grpc.aio.UnaryStreamCall of GenerateResponse


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; `usage` and `timeline` came with its last message."""

    request_id: str
    tokens: tuple[int, ...]
    text: str
    finish: str
    usage: generation_pb2.Usage
    timeline: common_pb2.Timeline


@contextlib.asynccontextmanager
async def streaming(
    endpoint: str, prompt: Sequence[int] | str, *, api_key: str = "", deadline: float = 100.0, **fields: Any
) -> AsyncIterator[Call]:
    """The call of one request: iterate over its responses, or `cancel()` it. `fields` are those of GenerateRequest;
    `deadline` is the call's, in seconds."""
    if isinstance(prompt, str):
        request = generation_pb2.GenerateRequest(text=prompt, **fields)
    else:
        request = generation_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(ids=prompt), **fields)
    async with grpc.aio.insecure_channel(endpoint, options=OPTIONS) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        yield stub.Generate(request, timeout=deadline, metadata=bearer(api_key))


async def collect(call: Call) -> Answer:
    """Every response of a call as one answer."""
    tokens: list[int] = []
    text, last = "", None
    async for last in call:
        tokens += last.token_ids
        text += last.text
    assert last is not None, "the call ended without a message"
    finish = common_pb2.FinishReason.Name(last.finish_reason).removeprefix("FINISH_REASON_").lower()
    return Answer(last.request_id, tuple(tokens), text, finish, last.usage, last.timeline)


async def cluster_call(endpoint: str, method: str, request: Any, *, admin_token: str = "") -> Any:
    """A unary call of baton.v1.Cluster; it waits for a coordinator that is being started again."""
    async with grpc.aio.insecure_channel(endpoint, options=OPTIONS) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        return await getattr(stub, method)(request, timeout=60.0, metadata=bearer(admin_token), wait_for_ready=True)


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),) if key else ()
