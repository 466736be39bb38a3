"""The end of a node: which of its parts ends when."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from baton.cluster_link.messages import Heartbeat, NodeLeaving
from baton.cluster_link.report_types import NodeStats
from baton.config.settings import Config
from baton.types import Role
from node_engine.core.step.engine import ComputeDevice
from node_engine.host.compute_thread import CallWhenIdle
from node_engine.host.node_runtime import NodeRuntime, call_on_loop

LAST_REPORT = Heartbeat(NodeStats())


class FakeLink:
    """Records what is asked of it, and when its task is cancelled."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.is_running = asyncio.Event()

    def send(self, report: object, incarnation: object) -> None:
        self.events.append(report)

    async def run(self) -> None:
        self.is_running.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.events.append("cancelled")

    async def close(self) -> None:
        self.events.append("closed")


class FakeInbox:
    """The inbox of a compute thread that makes its last report, and is idle then if `is_idle`."""

    def __init__(self, link: FakeLink, is_idle: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._link = link
        self._is_idle = is_idle

    def put(self, item: CallWhenIdle) -> None:
        call_on_loop(self._loop, self._link.send, LAST_REPORT, "i")
        if self._is_idle:
            item.callback()


@pytest.mark.asyncio
@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "drain timed out"])
async def test_link_is_closed_in_order_after_the_last_report(is_idle: bool) -> None:
    link = FakeLink()
    parts: Any = SimpleNamespace(
        config=Config(health_port=-1, drain_timeout=60.0 if is_idle else 0.01),
        reporter=SimpleNamespace(incarnation="i"),
        role=Role.DECODE,
        engine=SimpleNamespace(compute_device=ComputeDevice()),
        start=lambda role: None,
        stop=lambda: None,
        close=lambda: None,
        release_all=lambda: None,
        start_allocation=lambda when_exhausted: None,
    )
    fake_link: Any = link
    inbox: Any = FakeInbox(link, is_idle)
    runtime = NodeRuntime(parts, inbox, parts, parts, parts, None, fake_link, parts)
    stop = asyncio.Event()
    running = asyncio.create_task(runtime.run(stop))
    await link.is_running.wait()
    stop.set()
    await running
    assert link.events == [NodeLeaving("stopping"), LAST_REPORT, "closed", "cancelled"]
