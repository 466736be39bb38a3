"""Handshakes on the cluster port that fail are counted and said, at a bounded rate, at either end."""

import asyncio

import grpc
import pytest
from structlog.testing import capture_logs

from baton.coordinator_link import CoordinatorLink
from baton.errors import ConfigError
from baton.link_dialer import LinkDialer, failure_reason
from coordinator.handshakes import Handshakes
from tests.integration.coordinator_bench import coordinator
from tests.integration.test_coordinator_link import Node


async def failures(handshakes: Handshakes, counted: asyncio.Queue[int], begun: int, completed: int) -> int:
    for _ in range(begun):
        handshakes.begin()
    await asyncio.sleep(0)  # they are told from other threads
    for _ in range(completed):
        handshakes.complete()
    async with asyncio.timeout(30.0):
        return await counted.get()


async def test_what_brings_no_stream_has_failed_and_is_said_once_in_a_while() -> None:
    counted: asyncio.Queue[int] = asyncio.Queue()
    handshakes = Handshakes(counted.put_nowait, patience=0.05)
    with capture_logs() as lines:
        assert await failures(handshakes, counted, begun=5, completed=2) == 3
        assert await failures(handshakes, counted, begun=2, completed=0) == 2
    assert [line["connections"] for line in lines] == [3]
    assert "wrong cluster token" in lines[0]["event"]
    handshakes.close()


async def test_a_node_with_another_token_ends_with_one_line() -> None:
    async with coordinator(cluster_token="secret") as bench:
        link = CoordinatorLink(Node(lambda _: None), address=bench.address, token="guess", silence=5.0)
        with pytest.raises(ConfigError, match="wrong cluster token: give this process its --cluster-token"):
            async with asyncio.timeout(30.0):
                await link.run()


async def test_a_port_that_speaks_no_tls_is_told_from_a_coordinator_that_is_not_there() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    assert "--cluster-port" in await _reason(f"127.0.0.1:{port}")
    await server.stop(None)
    assert await _reason(f"127.0.0.1:{port}") == "UNAVAILABLE"


async def _reason(address: str) -> str:
    dialer = LinkDialer("secret")
    async with dialer.open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await dialer.dial(channel).read()
    return failure_reason(caught.value)
