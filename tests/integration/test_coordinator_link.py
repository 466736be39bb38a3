"""The node's end of its link, against a coordinator that misbehaves."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import grpc
import pytest

from baton import link_codec, wire
from baton.cluster_certificates import coordinator_credentials
from baton.coordinator_link import CoordinatorLink
from baton.errors import ConfigError
from baton.limits import MAX_UNSENT
from baton.pb import cluster_pb2 as pb
from baton.pb.cluster_pb2 import CoordinatorMessage, NodeMessage
from baton.types import Incarnation
from node_engine.core.messages import CoordinatorLost, Joined
from node_engine.host.commands import command_from_pb
from tests.fault_proxy import FaultyLink

PATIENCE = 30.0
SILENCE = 1.0  # seconds
Attach = Callable[[int, Any], Awaitable[None]]  # number of the stream, its context after the Join was read


def welcome(number: int) -> CoordinatorMessage:
    return CoordinatorMessage(
        welcome=pb.Welcome(incarnation=f"{number:016x}", heartbeat_seconds=0.05, silence_seconds=SILENCE)
    )


class Node:
    """The member that is linked."""

    join, stats = pb.Join, pb.NodeStats

    def __init__(self, deliver: Callable[[object], None]) -> None:
        self._deliver = deliver

    def joined(self, incarnation: Incarnation) -> None:
        self._deliver(Joined(incarnation))

    def coordinator_lost(self) -> None:
        self._deliver(CoordinatorLost())

    def told(self, message: CoordinatorMessage) -> None:
        command = command_from_pb(message)
        if command is not None:
            self._deliver(command)


@dataclass
class Rig:
    """A node's link through a faulty one, what it delivers, and its task."""

    link: CoordinatorLink
    between: FaultyLink
    delivered: asyncio.Queue[object]
    running: asyncio.Task[None]
    joins: list[pb.Join]

    async def joined(self) -> str:
        """The next incarnation."""
        async with asyncio.timeout(PATIENCE):
            while True:
                event = await self.delivered.get()
                if isinstance(event, Joined):
                    return event.incarnation
                assert isinstance(event, CoordinatorLost)


@asynccontextmanager
async def linked(attach: Attach) -> AsyncIterator[Rig]:
    streams, joins = 0, list[pb.Join]()

    async def serve(_: object, context: Any) -> None:
        nonlocal streams
        streams += 1
        first = await context.read()
        if first:  # else it was damaged
            joins.append(first.join)
        await attach(streams, context)

    server = grpc.aio.server()
    link_codec.add_to(server, serve)
    port = server.add_secure_port("127.0.0.1:0", coordinator_credentials("", lambda: None))
    between = await FaultyLink.open("node -> coordinator", ("127.0.0.1", port))
    await server.start()
    delivered: asyncio.Queue[object] = asyncio.Queue()
    address = f"127.0.0.1:{between.port}"
    link = CoordinatorLink(Node(delivered.put_nowait), address=address, token="", silence=SILENCE)
    running = asyncio.create_task(link.run())
    try:
        yield Rig(link, between, delivered, running, joins)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await between.close()
        await server.stop(None)


async def pinging(number: int, context: Any) -> None:
    """A good coordinator with nothing to say."""
    await context.write(welcome(number))
    while True:
        await context.write(CoordinatorMessage(ping=pb.Ping()))
        await asyncio.sleep(0.1)


async def test_a_coordinator_that_does_not_read_is_left_and_joined_anew() -> None:
    async def attach(number: int, context: Any) -> None:
        await context.write(welcome(number))
        await asyncio.Event().wait()

    async with linked(attach) as rig:
        first = await rig.joined()
        for _ in range(MAX_UNSENT + 100):
            rig.link.send(NodeMessage(incarnation=first))
        assert await rig.joined() != first
        assert not rig.running.done()


async def test_a_stranded_connection_is_not_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC would hand a new channel the connection that an earlier one has left open."""
    dials, dial = count(), link_codec.dial

    def counted(*what: Any, **more: Any) -> Any:
        next(dials)
        return dial(*what, **more)

    monkeypatch.setattr(link_codec, "dial", counted)
    async with linked(pinging) as rig:
        first = await rig.joined()
        rig.between.strand()
        assert await rig.joined() != first
        assert rig.between.accepted == next(dials) >= 2, "each has a connection of its own"


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

    async with linked(attach) as rig:
        first = await rig.joined()
        assert await rig.joined() != first
        assert not rig.running.done()


async def test_a_lost_welcome_ends_the_stream_and_not_the_node() -> None:
    async def attach(number: int, context: Any) -> None:
        if number == 1:
            await context.write(CoordinatorMessage(number=2, ping=pb.Ping()))
            await asyncio.Event().wait()
        await pinging(number, context)

    async with linked(attach) as rig:
        assert await rig.joined() >= f"{2:016x}"
        assert not rig.running.done()


async def test_a_stream_that_ends_in_two_ways_at_once_does_not_end_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())

    async def overflow(self: CoordinatorLink) -> None:
        raise TimeoutError

    async def write(self: CoordinatorLink, call: Any) -> None:
        raise failed

    async with linked(pinging) as rig:
        first = await rig.joined()
        with monkeypatch.context() as patch:
            patch.setattr(CoordinatorLink, "_until_overflow", overflow)
            patch.setattr(CoordinatorLink, "_write", write)
            rig.between.strand()
            assert await rig.joined() != first
        assert await rig.joined()
        assert not rig.running.done()


async def test_who_hears_nothing_holds_nothing_for_longer_than_the_silence() -> None:
    """Noticing the silence takes all of the patience there is: what is held goes then, and not after as long again."""

    async def attach(number: int, context: Any) -> None:
        if number == 1:
            await context.write(welcome(number))
        await asyncio.Event().wait()

    async with linked(attach) as rig:
        await rig.joined()
        silent = []
        async with asyncio.timeout(PATIENCE):
            silent.append(await rig.delivered.get())
        assert silent == [CoordinatorLost()]
        assert rig.link._lost is not None
        assert rig.link._lost.when() <= rig.link._heard + SILENCE


async def test_who_was_never_a_member_ends_when_refused() -> None:
    async def attach(number: int, context: Any) -> None:
        await context.write(refusal())

    async with linked(attach) as rig:
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(ConfigError, match="dtype"):
                await rig.running


async def test_who_was_a_member_goes_on_trying() -> None:
    async def attach(number: int, context: Any) -> None:
        if number == 2:
            await context.write(refusal())
            return
        if number == 3:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "another token")
        await context.write(welcome(number))
        if number >= 4:
            await asyncio.Event().wait()

    async with linked(attach) as rig:
        assert await rig.joined() == f"{1:016x}"
        assert await rig.joined() >= f"{4:016x}"  # later ones when this process stood still over it
        assert not rig.running.done()


async def test_a_refusal_that_names_a_time_is_said_once_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a node that was never a member, too: the holder of its name may go. All of its joins are one process's."""
    said: list[tuple[str, str]] = []

    async def attach(number: int, context: Any) -> None:
        if number <= 3:
            await context.write(refusal(retry_seconds=0.01))
            return
        await context.write(welcome(number))
        await asyncio.Event().wait()

    async with linked(attach) as rig:
        monkeypatch.setattr(rig.link._log, "error", lambda what, *, reason, **_: said.append((what, reason)))
        await rig.joined()
        assert not rig.running.done()
        assert len(rig.joins) >= 4
        (process,) = {join.process for join in rig.joins}
        assert process
    assert said == [("may not join yet", refusal().refusal.error.message)]


def refusal(retry_seconds: float = 0.0) -> CoordinatorMessage:
    error = ConfigError("dtype is bfloat16 here and float32 in the cluster")
    return CoordinatorMessage(refusal=pb.Refusal(error=wire.error_to_pb(error), retry_seconds=retry_seconds))


async def test_a_node_that_is_to_end_while_its_stream_breaks_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual order of a cluster's end: the coordinator goes, and then its nodes are told to. What the stream was
    broken by must not take the place of the node's own end."""
    breaking, ended = asyncio.Event(), asyncio.Event()

    async def write(self: CoordinatorLink, call: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            breaking.set()
            await ended.wait()  # as one that has a message half written

    async def overflow(self: CoordinatorLink) -> None:
        raise TimeoutError

    async with linked(pinging) as rig:
        await rig.joined()
        with monkeypatch.context() as patch:
            patch.setattr(CoordinatorLink, "_write", write)
            rig.between.reset()  # the next stream is one with these
            patch.setattr(CoordinatorLink, "_until_overflow", overflow)
            async with asyncio.timeout(PATIENCE):
                await breaking.wait()
            rig.running.cancel()
            await asyncio.sleep(0)
            ended.set()
            done, _ = await asyncio.wait({rig.running}, timeout=PATIENCE / 3)
        assert done == {rig.running}
        assert rig.running.cancelled()
