"""The gRPC calls of a test, over a channel each, so that nothing is bound to an event loop."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from baton.pb import cluster_pb2_grpc, common_pb2, generation_pb2, generation_pb2_grpc

CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 250),
)
_Answer = TypeVar("_Answer")
GenerateCall = Any  # grpc.aio.UnaryStreamCall of GenerateResponse


@dataclass(frozen=True, slots=True)
class GenerateAnswer:
    """A whole answer; `usage` and `timeline` came with its last message."""

    request_id: str
    tokens: tuple[int, ...]
    text: str
    finish_reason: str
    usage: generation_pb2.Usage
    timeline: common_pb2.Timeline


@contextlib.asynccontextmanager
async def stream_generate(
    endpoint: str,
    prompt: Sequence[int] | str,
    *,
    api_key: str = "",
    deadline: float = 100.0,
    **fields: Any,
) -> AsyncIterator[GenerateCall]:
    """The call of one request: iterate over its responses, or `cancel()` it. `fields` are those of
    GenerateRequest; `deadline` is the call's, in seconds."""
    if isinstance(prompt, str):
        request = generation_pb2.GenerateRequest(text=prompt, **fields)
    else:
        request = generation_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=prompt), **fields
        )
    async with grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        yield stub.Generate(request, timeout=deadline, metadata=bearer_metadata(api_key))


async def collect_answer(call: GenerateCall) -> GenerateAnswer:
    """Every response of a call as one answer."""
    tokens: list[int] = []
    text, last = "", None
    async for last in call:
        tokens += last.token_ids
        text += last.text
    assert last is not None, "the call ended without a message"
    finish = common_pb2.FinishReason.Name(last.finish_reason).removeprefix("FINISH_REASON_").lower()
    return GenerateAnswer(last.request_id, tuple(tokens), text, finish, last.usage, last.timeline)


async def call_cluster_service(
    endpoint: str, method: str, request: Any, *, admin_token: str = ""
) -> Any:
    """A unary call of baton.v1.Cluster; it waits for a coordinator that is being started again."""
    async with grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        return await getattr(stub, method)(
            request, timeout=60.0, metadata=bearer_metadata(admin_token), wait_for_ready=True
        )


async def none_if_unavailable(call: Awaitable[_Answer]) -> _Answer | None:
    """Return the answer of a gRPC call, or None for UNAVAILABLE, as when its server is killed."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return None


def bearer_metadata(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),) if key else ()
