"""A stream's end at the pool, however gRPC brings it about."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.cluster_link import pb_conversion as wire
from baton.pb import pool_pb2 as pb
from baton.process.clock import FakeClock
from kv_pool.core.blocks.attachments import PoolClientId
from kv_pool.service.link_service import PoolLinkService
from kv_pool.service.pool_manager import PoolClientSession, PoolManager
from tests.pool.harness import LAYOUT


class FakePoolManager:
    """A manager that attaches every client."""

    incarnation = "an incarnation"
    open_pool: Any = SimpleNamespace(
        store=SimpleNamespace(name="a segment"),
        block_pool=SimpleNamespace(memory=SimpleNamespace(num_blocks=8)),
    )

    def __init__(self) -> None:
        self.ended_sessions: list[PoolClientSession] = []

    async def attach_client(self, _: object) -> PoolClientSession:
        return PoolClientSession(self.open_pool, PoolClientId("a node"), 1, FakeClock())

    def on_stream_ended(self, session: PoolClientSession) -> None:
        self.ended_sessions.append(session)


class SlowCancelContext:
    """A node that attaches and asks nothing more. What reads its stream takes its time when it is
    cancelled."""

    def __init__(self) -> None:
        self.attached, self.is_cancelling, self.may_end = (
            asyncio.Event(),
            asyncio.Event(),
            asyncio.Event(),
        )

    async def read(self) -> Any:
        if not self.attached.is_set():
            return pb.PoolQuestion(attach=pb.AttachPool(layout=wire.layout_to_pb(LAYOUT)))
        try:
            await asyncio.Event().wait()
        finally:
            self.is_cancelling.set()
            await self.may_end.wait()

    async def write(self, _: object) -> None:
        self.attached.set()


@pytest.mark.asyncio
async def test_pool_stop_does_not_wait_for_a_stream_cancelled_twice() -> None:
    host, context = FakePoolManager(), SlowCancelContext()
    service = PoolLinkService(cast(PoolManager, host))
    stream = asyncio.create_task(service.Attach(None, context))
    await context.attached.wait()
    draining = asyncio.create_task(service.drain())
    stream.cancel()
    await context.is_cancelling.wait()
    stream.cancel()
    await asyncio.wait_for(draining, 30)
    assert len(host.ended_sessions) == 1
    context.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await stream
