"""A member closes its stream in order, and no coordinator can hold it for long."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from baton.cluster_link import coordinator_link
from baton.cluster_link.coordinator_link import CoordinatorLink
from baton.cluster_link.messages import NodeLeaving, PoolJoinInfo
from baton.cluster_link.report_types import NodeStats
from baton.kv.blocks import KVLayout
from baton.limits import MAX_UNSENT_MESSAGES
from baton.pb import cluster_pb2 as pb
from baton.types import Incarnation, NodeName

pytestmark = pytest.mark.asyncio

TIMEOUT_SECONDS = 30.0  # for a test
INCARNATION = Incarnation("1" * 16)
WELCOME = pb.CoordinatorMessage(
    number=1,
    welcome=pb.Welcome(incarnation=INCARNATION, heartbeat_seconds=3600.0, silence_seconds=3600.0),
)
UNAVAILABLE = grpc.aio.AioRpcError(
    grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata()
)


class FakeMember:
    build_stats = NodeStats

    def build_join(self) -> PoolJoinInfo:
        return PoolJoinInfo(0, NodeName("p"), "", "", 0, "", KVLayout(0, 0, 0, 0, ""), 0)

    def on_joined(self, incarnation: Incarnation) -> None:
        """Nothing to drop."""

    def on_coordinator_lost(self) -> None:
        """Nothing to drop."""


class FakeCall:
    """The member's end of a stream. Writes wait while `may_write` is not set."""

    def __init__(self) -> None:
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.written: list[str] = []  # kinds of messages; "end" is the half-close
        self.has_ended = asyncio.Event()  # the member's direction
        self.is_cancelled = False
        self._incoming: asyncio.Queue[Any] = asyncio.Queue()

    async def write(self, message: pb.NodeMessage) -> None:
        await self.may_write.wait()
        self.written.append(str(message.WhichOneof("message")))

    async def done_writing(self) -> None:
        self.written.append("end")
        self.has_ended.set()

    async def read(self) -> Any:
        message = await self._incoming.get()
        if isinstance(message, Exception):
            raise message
        return message

    def cancel(self) -> None:
        self.is_cancelled = True

    def send_to_member(self, message: Any) -> None:
        self._incoming.put_nowait(message)


class FakeDialer:
    def __init__(self) -> None:
        self.calls: list[FakeCall] = []
        self.is_welcoming = True

    @asynccontextmanager
    async def open_channel(self, address: str) -> AsyncIterator[None]:
        yield

    def open_stream(self, channel: None) -> FakeCall:
        call = FakeCall()
        if self.is_welcoming:
            call.send_to_member(WELCOME)
        self.calls.append(call)
        return call


@dataclass
class LinkHarness:
    link: CoordinatorLink
    dialer: FakeDialer
    running: asyncio.Task[None]

    def leave(self) -> None:
        self.link.send(NodeLeaving("stopping"), INCARNATION)

    async def join(self) -> FakeCall:
        """Wait until the link is joined and has sent its first heartbeat."""
        while not self.dialer.calls or self.dialer.calls[-1].written != ["join", "heartbeat"]:
            await asyncio.sleep(0)
        return self.dialer.calls[-1]


@asynccontextmanager
async def running_link(
    monkeypatch: pytest.MonkeyPatch, close_timeout_seconds: float = 3600.0
) -> AsyncIterator[LinkHarness]:
    monkeypatch.setattr(coordinator_link, "CLOSE_TIMEOUT_SECONDS", close_timeout_seconds)
    link = CoordinatorLink(
        FakeMember(), on_order=lambda _: None, address="", token="", silence=3600.0
    )
    dialer = FakeDialer()
    monkeypatch.setattr(link, "_dialer", dialer)
    running = asyncio.create_task(link.run())
    async with asyncio.timeout(TIMEOUT_SECONDS):
        yield LinkHarness(link, dialer, running)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_close_writes_all_messages_and_awaits_the_end_of_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_link(monkeypatch) as harness:
        call = await harness.join()
        call.may_write.clear()
        harness.leave()
        harness.leave()
        closing = asyncio.create_task(harness.link.close())
        await asyncio.sleep(0)
        for _ in range(MAX_UNSENT_MESSAGES + 1):
            harness.leave()  # nothing follows the end, and nothing fills the queue
        harness.link.rejoin()
        call.may_write.set()
        await call.has_ended.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        assert call.written == ["join", "heartbeat", "leaving", "leaving", "end"]
        assert not closing.done(), "the coordinator may not have read all of it"
        assert not call.is_cancelled
        call.send_to_member(grpc.aio.EOF)
        await closing
        await harness.running
        assert len(harness.dialer.calls) == 1


async def test_close_does_not_wait_for_a_coordinator_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_link(monkeypatch, close_timeout_seconds=0.01) as harness:
        call = await harness.join()
        harness.leave()
        await harness.link.close()
        assert call.written == ["join", "heartbeat", "leaving", "end"]
        harness.running.cancel()
        await asyncio.wait({harness.running})
        assert call.is_cancelled


async def test_close_does_not_wait_for_a_coordinator_that_reads_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full queue ends the stream, and leaves no room for its end."""
    async with running_link(monkeypatch) as harness:
        call = await harness.join()
        call.may_write.clear()
        for _ in range(MAX_UNSENT_MESSAGES):
            harness.leave()
        await asyncio.sleep(0)  # one is being written
        harness.leave()
        await harness.link.close()
        await harness.running
        assert call.is_cancelled


async def test_close_does_not_wait_for_a_coordinator_that_gives_no_welcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_link(monkeypatch) as harness:
        call = await harness.join()
        harness.dialer.is_welcoming = False
        call.send_to_member(UNAVAILABLE)
        while len(harness.dialer.calls) < 2:
            await asyncio.sleep(0)
        await harness.link.close()
        assert not harness.running.done(), "the stream has not begun, and no message waits"


async def test_stream_that_breaks_while_it_closes_ends_the_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_link(monkeypatch) as harness:
        call = await harness.join()
        call.may_write.clear()
        harness.leave()
        closing = asyncio.create_task(harness.link.close())
        await asyncio.sleep(0)
        call.send_to_member(UNAVAILABLE)
        await closing
        await harness.running
        assert len(harness.dialer.calls) == 1
