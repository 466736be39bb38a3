"""A member leaves: what it has sent before is handled."""

import asyncio

import pytest

from baton.cluster_link.coordinator_link import CoordinatorLink
from baton.cluster_link.messages import NodeLeaving
from node_engine.core.node_commands import NodeJoined
from tests.integration.coordinator_harness import CoordinatorHarness
from tests.integration.node_links.fake_link_member import FakeLinkMember

TIMEOUT_SECONDS = 30.0


async def test_all_messages_of_a_member_that_closes_its_stream_are_handled(
    coordinator: CoordinatorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator removes the member before it ends the stream."""
    received: list[object] = []
    monkeypatch.setattr(
        coordinator.dispatcher, "receive_report", lambda _, report: received.append(report)
    )
    joined: asyncio.Queue[object] = asyncio.Queue()
    link = CoordinatorLink(
        FakeLinkMember(joined.put_nowait),
        on_order=lambda _: None,
        address=coordinator.cluster_port_address,
        token="",
        silence=TIMEOUT_SECONDS,
    )
    running = asyncio.create_task(link.run())
    async with asyncio.timeout(TIMEOUT_SECONDS):
        event = await joined.get()
        assert isinstance(event, NodeJoined)
        reports = [NodeLeaving(str(number)) for number in range(100)]
        for report in reports:
            link.send(report, event.incarnation)
        await link.close()
        assert [one for one in received if isinstance(one, NodeLeaving)] == reports
        assert not coordinator.dispatcher.node_connections
        await running
