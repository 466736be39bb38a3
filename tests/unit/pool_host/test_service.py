"""A stream's end at the pool, however gRPC brings it about."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton import wire
from baton.pb import pool_pb2 as pb
from kv_pool.core.holders import Holder
from kv_pool.host import Desk, PoolHost
from kv_pool.service import PoolService
from tests.pool.rig import LAYOUT


class Host:
    """Whoever comes is attached."""

    segment, incarnation = "a segment", "an incarnation"
    pool = SimpleNamespace(memory=SimpleNamespace(total=8))

    def __init__(self) -> None:
        self.left: list[Desk] = []

    async def attach(self, _: object) -> Desk:
        return Desk(Holder("a node"), 1)

    def ended(self, desk: Desk) -> None:
        self.left.append(desk)


class Context:
    """A node that attaches and asks nothing more. What reads its stream takes its time when it is cancelled."""

    def __init__(self) -> None:
        self.attached, self.letting_go, self.let_go = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def read(self) -> Any:
        if not self.attached.is_set():
            return pb.PoolQuestion(attach=pb.AttachPool(layout=wire.layout_to_pb(LAYOUT)))
        try:
            await asyncio.Event().wait()
        finally:
            self.letting_go.set()
            await self.let_go.wait()

    async def write(self, _: object) -> None:
        self.attached.set()


@pytest.mark.asyncio
async def test_a_pool_that_stops_does_not_wait_for_a_stream_that_was_cancelled_twice() -> None:
    host, context = Host(), Context()
    service = PoolService(cast(PoolHost, host))
    stream = asyncio.create_task(service.Attach(None, context))
    await context.attached.wait()
    draining = asyncio.create_task(service.drain())
    stream.cancel()
    await context.letting_go.wait()
    stream.cancel()
    await asyncio.wait_for(draining, 30)
    assert len(host.left) == 1
    context.let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await stream
