"""The node's end of its link, against a coordinator that misbehaves."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import grpc
import pytest

from baton.cluster_link import coordinator_link
from baton.cluster_link import pb_conversion as wire
from baton.cluster_link import stream as link_stream
from baton.cluster_link.coordinator_link import CoordinatorLink
from baton.cluster_link.messages import NodeLeaving
from baton.errors import ConfigError
from baton.limits import MAX_UNSENT_MESSAGES
from baton.network.cluster_certificates import coordinator_server_credentials
from baton.pb import cluster_pb2 as pb
from baton.pb.cluster_pb2 import CoordinatorMessage
from baton.types import Incarnation
from node_engine.core.node_commands import CoordinatorLost, NodeJoined
from tests.fault_proxy import FaultProxy
from tests.integration.node_links.fake_link_member import (
    FakeLinkMember,
)

TIMEOUT_SECONDS = 30.0
SILENCE_SECONDS = 1.0  # seconds
AttachHandler = Callable[
    [int, Any], Awaitable[None]
]  # number of the stream, its context after the Join was read


def welcome_message(number: int) -> CoordinatorMessage:
    return CoordinatorMessage(
        welcome=pb.Welcome(
            incarnation=f"{number:016x}", heartbeat_seconds=0.05, silence_seconds=SILENCE_SECONDS
        )
    )


@dataclass
class NodeLinkHarness:
    """A node's link through a faulty one, what it delivers, and its task."""

    link: CoordinatorLink
    fault_proxy: FaultProxy
    delivered: asyncio.Queue[object]
    link_task: asyncio.Task[None]
    joins: list[pb.Join]

    async def wait_joined(self) -> str:
        """The next incarnation."""
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while True:
                event = await self.delivered.get()
                if isinstance(event, NodeJoined):
                    return event.incarnation
                assert isinstance(event, CoordinatorLost)


@asynccontextmanager
async def running_link(attach: AttachHandler) -> AsyncIterator[NodeLinkHarness]:
    streams, joins = 0, list[pb.Join]()

    async def serve(_: object, context: Any) -> None:
        nonlocal streams
        streams += 1
        first = await context.read()
        if first:  # else it was damaged
            joins.append(first.join)
        await attach(streams, context)

    server = grpc.aio.server()
    link_stream.add_link_service(server, serve)
    port = server.add_secure_port("127.0.0.1:0", coordinator_server_credentials("", lambda: None))
    between = await FaultProxy.open("node -> coordinator", ("127.0.0.1", port))
    await server.start()
    delivered: asyncio.Queue[object] = asyncio.Queue()
    address = f"127.0.0.1:{between.port}"
    link = CoordinatorLink(
        FakeLinkMember(delivered.put_nowait),
        on_order=delivered.put_nowait,
        address=address,
        token="",
        silence=SILENCE_SECONDS,
    )
    running = asyncio.create_task(link.run())
    try:
        yield NodeLinkHarness(link, between, delivered, running, joins)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await between.close()
        await server.stop(None)


async def send_pings(number: int, context: Any) -> None:
    """A good coordinator with nothing to say."""
    await context.write(welcome_message(number))
    while True:
        await context.write(CoordinatorMessage(ping=pb.Ping()))
        await asyncio.sleep(0.1)


async def test_node_rejoins_when_the_coordinator_stops_reading() -> None:
    async def attach(number: int, context: Any) -> None:
        await context.write(welcome_message(number))
        await asyncio.Event().wait()

    async with running_link(attach) as rig:
        first = await rig.wait_joined()
        for _ in range(MAX_UNSENT_MESSAGES + 100):
            rig.link.send(NodeLeaving(""), Incarnation(first))
        assert await rig.wait_joined() != first
        assert not rig.link_task.done()


@pytest.mark.parametrize("is_connected", [True, False], ids=["hanging", "unreachable"])
async def test_leaving_node_gives_up_a_coordinator_that_does_not_end_the_stream(
    monkeypatch: pytest.MonkeyPatch, is_connected: bool
) -> None:
    monkeypatch.setattr(coordinator_link, "CLOSE_TIMEOUT_SECONDS", 0.05)
    async with running_link(send_pings) as rig:
        incarnation = await rig.wait_joined()
        if not is_connected:
            rig.fault_proxy.strand_connections()
        rig.link.send(NodeLeaving(""), Incarnation(incarnation))
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await rig.link.close()
            rig.link_task.cancel()
            await asyncio.wait({rig.link_task})
        assert rig.link_task.cancelled()


async def test_rejoin_opens_a_new_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC would hand a new channel the connection that an earlier one has left open."""
    dials, dial = count(), link_stream.open_link_stream

    def counted(*what: Any, **more: Any) -> Any:
        next(dials)
        return dial(*what, **more)

    monkeypatch.setattr(link_stream, "open_link_stream", counted)
    async with running_link(send_pings) as rig:
        first = await rig.wait_joined()
        rig.fault_proxy.strand_connections()
        assert await rig.wait_joined() != first
        assert rig.fault_proxy.accepted_connections == next(dials) >= 2, (
            "each has a connection of its own"
        )


async def test_malformed_message_ends_the_stream_but_not_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seal = link_stream.encode_checked

    def damaged(message: Any) -> bytes:
        data = bytearray(seal(message))
        data[0] ^= message.HasField("ping")
        return bytes(data)

    monkeypatch.setattr(link_stream, "encode_checked", damaged)

    async def attach(number: int, context: Any) -> None:
        await context.write(welcome_message(number))
        if number == 1:
            await context.write(CoordinatorMessage(ping=pb.Ping()))
        await asyncio.Event().wait()

    async with running_link(attach) as rig:
        first = await rig.wait_joined()
        assert await rig.wait_joined() != first
        assert not rig.link_task.done()


async def test_order_out_of_bounds_ends_the_stream_but_not_the_node() -> None:
    async def attach(number: int, context: Any) -> None:
        await context.write(welcome_message(number))
        if number == 1:
            order = pb.SetRole(role="neither")
            await context.write(CoordinatorMessage(number=2, set_role=order))
        await asyncio.Event().wait()

    async with running_link(attach) as rig:
        first = await rig.wait_joined()
        assert await rig.wait_joined() != first
        assert not rig.link_task.done()


async def test_missing_welcome_ends_the_stream_but_not_the_node() -> None:
    async def attach(number: int, context: Any) -> None:
        if number == 1:
            await context.write(CoordinatorMessage(number=2, ping=pb.Ping()))
            await asyncio.Event().wait()
        await send_pings(number, context)

    async with running_link(attach) as rig:
        assert await rig.wait_joined() >= f"{2:016x}"
        assert not rig.link_task.done()


async def test_stream_failing_in_two_ways_at_once_does_not_end_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata()
    )

    async def overflow(self: CoordinatorLink) -> None:
        raise TimeoutError

    async def write(self: CoordinatorLink, call: Any) -> None:
        raise failed

    async with running_link(send_pings) as rig:
        first = await rig.wait_joined()
        with monkeypatch.context() as patch:
            patch.setattr(CoordinatorLink, "_wait_for_overflow", overflow)
            patch.setattr(CoordinatorLink, "_send_queued", write)
            rig.fault_proxy.strand_connections()
            assert await rig.wait_joined() != first
        assert await rig.wait_joined()
        assert not rig.link_task.done()


async def test_work_is_dropped_after_the_silence_timeout() -> None:
    """Noticing the silence takes all of the patience there is: what is held goes then, and not
    after as long again."""

    async def attach(number: int, context: Any) -> None:
        if number == 1:
            await context.write(welcome_message(number))
        await asyncio.Event().wait()

    async with running_link(attach) as rig:
        await rig.wait_joined()
        silent = []
        async with asyncio.timeout(TIMEOUT_SECONDS):
            silent.append(await rig.delivered.get())
        assert silent == [CoordinatorLost()]
        assert rig.link._lost_timer is not None
        assert rig.link._lost_timer.when() <= rig.link._heard_at + SILENCE_SECONDS


async def test_refused_node_that_never_joined_exits() -> None:
    async def attach(number: int, context: Any) -> None:
        await context.write(refusal_message())

    async with running_link(attach) as rig:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            with pytest.raises(ConfigError, match="dtype"):
                await rig.link_task


async def test_refused_node_that_had_joined_retries() -> None:
    async def attach(number: int, context: Any) -> None:
        if number == 2:
            await context.write(refusal_message())
            return
        if number == 3:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "another token")
        await context.write(welcome_message(number))
        if number >= 4:
            await asyncio.Event().wait()

    async with running_link(attach) as rig:
        assert await rig.wait_joined() == f"{1:016x}"
        assert (
            await rig.wait_joined() >= f"{4:016x}"
        )  # later ones when this process stood still over it
        assert not rig.link_task.done()


async def test_refusal_with_a_retry_time_is_logged_once_and_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a node that was never a member, too: the holder of its name may go. All of its joins are
    one process's."""
    said: list[tuple[str, str]] = []

    async def attach(number: int, context: Any) -> None:
        if number <= 3:
            await context.write(refusal_message(retry_seconds=0.01))
            return
        await context.write(welcome_message(number))
        await asyncio.Event().wait()

    async with running_link(attach) as rig:
        monkeypatch.setattr(
            rig.link._log, "error", lambda what, *, reason, **_: said.append((what, reason))
        )
        await rig.wait_joined()
        assert not rig.link_task.done()
        assert len(rig.joins) >= 4
        (process,) = {join.process for join in rig.joins}
        assert process
    assert said == [("join refused for now, retrying", refusal_message().refusal.error.message)]


def refusal_message(retry_seconds: float = 0.0) -> CoordinatorMessage:
    error = ConfigError("dtype is bfloat16 here and float32 in the cluster")
    return CoordinatorMessage(
        refusal=pb.Refusal(error=wire.error_to_pb(error), retry_seconds=retry_seconds)
    )


async def test_stopping_node_exits_when_its_stream_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual order of a cluster's end: the coordinator goes, and then its nodes are told to.
    What the stream was broken by must not take the place of the node's own end."""
    breaking, ended = asyncio.Event(), asyncio.Event()

    async def write(self: CoordinatorLink, call: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            breaking.set()
            await ended.wait()  # as one that has a message half written

    async def overflow(self: CoordinatorLink) -> None:
        raise TimeoutError

    async with running_link(send_pings) as rig:
        await rig.wait_joined()
        with monkeypatch.context() as patch:
            patch.setattr(CoordinatorLink, "_send_queued", write)
            rig.fault_proxy.reset_connections()  # the next stream is one with these
            patch.setattr(CoordinatorLink, "_wait_for_overflow", overflow)
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await breaking.wait()
            rig.link_task.cancel()
            await asyncio.sleep(0)
            ended.set()
            done, _ = await asyncio.wait({rig.link_task}, timeout=TIMEOUT_SECONDS / 3)
        assert done == {rig.link_task}
        assert rig.link_task.cancelled()
