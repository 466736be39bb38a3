"""The node's end of its link, against a coordinator that misbehaves."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from baton import link_codec, wire
from baton.errors import ConfigError
from baton.limits import MAX_UNSENT
from baton.pb import cluster_pb2 as pb
from baton.pb.cluster_pb2 import CoordinatorMessage, NodeMessage
from node_engine.core.messages import CoordinatorLost, Joined
from node_engine.host.coordinator_link import CoordinatorLink

PATIENCE = 10.0
Attach = Callable[[int, Any], Awaitable[None]]  # number of the stream, its context after the Join was read


def welcome(number: int) -> CoordinatorMessage:
    return CoordinatorMessage(
        welcome=pb.Welcome(incarnation=f"{number:016x}", heartbeat_seconds=0.05, silence_seconds=5.0)
    )


@asynccontextmanager
async def linked(attach: Attach) -> AsyncIterator[tuple[CoordinatorLink, asyncio.Queue[object], asyncio.Task[None]]]:
    """A link that runs, what it delivers, and its task."""
    streams = 0

    async def serve(_: object, context: Any) -> None:
        nonlocal streams
        streams += 1
        await context.read()
        await attach(streams, context)

    server = grpc.aio.server()
    link_codec.add_to(server, serve)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    delivered: asyncio.Queue[object] = asyncio.Queue()
    link = CoordinatorLink(
        address=f"127.0.0.1:{port}", token="", silence=5.0, join=pb.Join, stats=pb.NodeStats,
        deliver=delivered.put_nowait,
    )  # fmt: skip
    running = asyncio.create_task(link.run())
    try:
        yield link, delivered, running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(None)


async def joined(delivered: asyncio.Queue[object]) -> str:
    async with asyncio.timeout(PATIENCE):
        while True:
            event = await delivered.get()
            if isinstance(event, Joined):
                return event.incarnation
            assert isinstance(event, CoordinatorLost)


async def test_a_coordinator_that_does_not_read_is_left_and_joined_anew() -> None:
    async def attach(number: int, context: Any) -> None:
        await context.write(welcome(number))
        await asyncio.Event().wait()

    async with linked(attach) as (link, delivered, running):
        first = await joined(delivered)
        for _ in range(MAX_UNSENT + 100):
            link.send(NodeMessage(incarnation=first))
        assert await joined(delivered) != first
        assert not running.done()


async def test_a_damaged_message_ends_the_stream_and_not_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    seal = link_codec.seal

    def damaged(message: Any) -> bytes:
        data = bytearray(seal(message))
        data[0] ^= message.HasField("ping")
        return bytes(data)

    monkeypatch.setattr(link_codec, "seal", damaged)

    async def attach(number: int, context: Any) -> None:
        await context.write(welcome(number))
        if number == 1:
            await context.write(CoordinatorMessage(ping=pb.Ping()))
        await asyncio.Event().wait()

    async with linked(attach) as (_, delivered, running):
        first = await joined(delivered)
        assert await joined(delivered) != first
        assert not running.done()


async def test_who_was_never_a_member_ends_when_refused() -> None:
    async def attach(number: int, context: Any) -> None:
        await context.write(refusal())

    async with linked(attach) as (_, _, running):
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(ConfigError, match="dtype"):
                await running


async def test_who_was_a_member_goes_on_trying() -> None:
    async def attach(number: int, context: Any) -> None:
        if number == 2:
            await context.write(refusal())
            return
        if number == 3:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "another token")
        await context.write(welcome(number))
        if number == 4:
            await asyncio.Event().wait()

    async with linked(attach) as (_, delivered, running):
        assert await joined(delivered) == f"{1:016x}"
        assert await joined(delivered) == f"{4:016x}"
        assert not running.done()


def refusal() -> CoordinatorMessage:
    error = ConfigError("dtype is bfloat16 here and float32 in the cluster")
    return CoordinatorMessage(refusal=pb.Refusal(error=wire.error_to_pb(error)))
