"""Handshakes on the cluster port that fail are counted and said, at a bounded rate, at either
end."""

import asyncio

import grpc
import pytest
from structlog.testing import capture_logs

from baton.cluster_link.coordinator_link import CoordinatorLink
from baton.cluster_link.dialer import CoordinatorDialer, describe_link_failure
from baton.errors import ConfigError
from coordinator.node_links.handshake_monitor import HandshakeMonitor
from tests.integration.coordinator_harness import running_coordinator
from tests.integration.node_links.fake_link_member import FakeLinkMember


async def failures(
    handshakes: HandshakeMonitor, counted: asyncio.Queue[int], begun: int, completed: int
) -> int:
    for _ in range(begun):
        handshakes.on_handshake_started()
    await asyncio.sleep(0)  # they are told from other threads
    for _ in range(completed):
        handshakes.on_stream_opened()
    async with asyncio.timeout(30.0):
        return await counted.get()


async def test_failed_handshakes_are_counted_and_logged_at_a_bounded_rate() -> None:
    counted: asyncio.Queue[int] = asyncio.Queue()
    handshakes = HandshakeMonitor(counted.put_nowait, timeout_seconds=0.05)
    with capture_logs() as lines:
        assert await failures(handshakes, counted, begun=5, completed=2) == 3
        assert await failures(handshakes, counted, begun=2, completed=0) == 2
    assert [line["connections"] for line in lines] == [3]
    assert "wrong cluster token" in lines[0]["event"]
    handshakes.close()


async def test_node_with_a_wrong_token_exits_with_one_line() -> None:
    async with running_coordinator(cluster_token="secret") as coordinator:
        link = CoordinatorLink(
            FakeLinkMember(lambda _: None),
            on_order=lambda _: None,
            address=coordinator.cluster_port_address,
            token="guess",
            silence=5.0,
        )
        with pytest.raises(
            ConfigError, match="wrong cluster token: give this process its --cluster-token"
        ):
            async with asyncio.timeout(30.0):
                await link.run()


async def test_port_without_tls_is_told_from_an_absent_coordinator() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    assert "--cluster-port" in await _reason(f"127.0.0.1:{port}")
    await server.stop(None)
    assert await _reason(f"127.0.0.1:{port}") == "UNAVAILABLE"


async def _reason(address: str) -> str:
    dialer = CoordinatorDialer("secret")
    async with dialer.open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await dialer.open_stream(channel).read()
    return describe_link_failure(caught.value)
