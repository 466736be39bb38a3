"""Blocks are transferred between pools completely or not at all, and nothing is held afterwards."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import (
    BatonError,
    ChecksumMismatch,
    HandoffFailed,
    IncompleteTransfer,
    LeaseExpired,
    PeerUnreachable,
    StaleMessage,
)
from baton.kv.blocks import root_hash
from baton.types import Incarnation
from kv_pool.common.grpc_link import PeerChannels, PoolDialer
from tests.pool.harness import DIGEST, LAYOUT, expected_blocks, make_tokens, wait_until
from tests.pool.pool_endpoints import PoolEndpoint, pool_endpoint

PROMPT = make_tokens(1, 20)


@asynccontextmanager
async def stalled_fetch(
    folder: Path,
) -> AsyncIterator[tuple[PoolEndpoint, PoolEndpoint, asyncio.Task[None]]]:
    """Two pools and a fetch that does not end: its seal is lost, and no time-out comes soon."""
    async with pool_endpoint(folder / "a", "a") as here, pool_endpoint(folder / "b", "b") as there:
        there.publish_tokens(PROMPT)
        there.failpoints.arm("transfer.seal.before=drop*1")
        fetching = asyncio.create_task(here.fetch_from(there, PROMPT))
        await wait_until("asked", lambda: there.pool.ledger(0.0).entries)
        yield here, there, fetching


@pytest.mark.asyncio
@pytest.mark.parametrize("transport", ["zmq", "grpc"])
async def test_fetched_blocks_are_identical(tmp_path: Path, transport: str) -> None:
    async with (
        pool_endpoint(tmp_path / "a", "a", transport) as here,
        pool_endpoint(tmp_path / "b", "b", transport) as there,
    ):
        there.publish_tokens(PROMPT)
        await here.fetch_from(there, PROMPT, end=12)
        assert here.read_blocks(PROMPT) == expected_blocks(PROMPT)[:12]
        await here.fetch_from(there, PROMPT)
        assert here.read_blocks(PROMPT) == expected_blocks(PROMPT), (
            "the rest goes on where that ended"
        )
        await wait_until(
            "told so", lambda: there.sender.block_counters["baton_pool_sent_blocks_total"] == 20
        )


@pytest.mark.asyncio
async def test_failed_fetch_is_a_miss_and_leaks_nothing(tmp_path: Path) -> None:
    async with (
        pool_endpoint(tmp_path / "a", "a") as here,
        pool_endpoint(tmp_path / "b", "b") as there,
    ):
        there.publish_tokens(PROMPT[: 10 * LAYOUT.block_size])
        with pytest.raises(IncompleteTransfer, match="10 of 20"):
            await here.fetch_from(there, PROMPT)
        there.failpoints.arm("transfer.write.before=corrupt*1")
        with pytest.raises(ChecksumMismatch):
            await here.fetch_from(there, PROMPT, end=10)
        here.failpoints.arm("transfer.land.before=error*1")
        with pytest.raises(BatonError):
            await here.fetch_from(there, PROMPT, end=10)
        stale = replace(there.address, incarnation=Incarnation("an earlier life"))
        there.address, address = stale, there.address
        with pytest.raises(StaleMessage, match="earlier life"):
            await here.fetch_from(there, PROMPT, end=10)
        there.address = address
        assert here.read_blocks(PROMPT) == []
        for endpoint in (here, there):
            await endpoint.wait_until_idle()
        await here.fetch_from(there, PROMPT, end=10)
        assert here.read_blocks(PROMPT) == expected_blocks(PROMPT)[:10]


@pytest.mark.asyncio
async def test_another_tenants_blocks_are_not_sent(tmp_path: Path) -> None:
    async with (
        pool_endpoint(tmp_path / "a", "a") as here,
        pool_endpoint(tmp_path / "b", "b") as there,
    ):
        there.publish_tokens(PROMPT, root_hash(DIGEST, LAYOUT, b"another tenant's salt"))
        with pytest.raises(IncompleteTransfer, match="0 of 20"):
            await here.fetch_from(there, PROMPT)


@pytest.mark.asyncio
async def test_fetch_from_a_stopped_writer_ends_with_its_lease(tmp_path: Path) -> None:
    """The sender's end of the plane is stopped, as its process would be."""
    async with (
        pool_endpoint(tmp_path / "a", "a", ticket_ttl=0.3) as here,
        pool_endpoint(tmp_path / "b", "b") as there,
    ):
        there.publish_tokens(PROMPT)
        there.failpoints.arm("transfer.write.before=delay(600)*1")
        with pytest.raises(LeaseExpired):
            await here.fetch_from(there, PROMPT)
        assert here.read_blocks(PROMPT) == []
        there.failpoints.release_delays()
        await there.wait_until_idle()


@pytest.mark.asyncio
async def test_death_of_the_sending_pool_fails_the_fetch_at_once(tmp_path: Path) -> None:
    async with stalled_fetch(tmp_path) as (here, there, fetching):
        await there.server.stop(None)
        with pytest.raises(HandoffFailed):
            await fetching
        assert here.read_blocks(PROMPT) == []
        with pytest.raises(PeerUnreachable):
            await here.fetch_from(there, PROMPT)


@pytest.mark.asyncio
async def test_cancelled_fetch_stops_the_sender(tmp_path: Path) -> None:
    """As when the fetching pool dies, or closes a connection on which another query has failed."""
    async with stalled_fetch(tmp_path) as (here, there, fetching):
        await here.receiver._channels.close()
        with pytest.raises(HandoffFailed):
            await fetching
        await there.wait_until_idle()
        there.failpoints.arm("")  # the fetch may have been given up before its seal was due
        await here.fetch_from(there, PROMPT)


@pytest.mark.asyncio
async def test_wrong_cluster_token_is_rejected(tmp_path: Path) -> None:
    async with (
        pool_endpoint(tmp_path / "a", "a") as here,
        pool_endpoint(tmp_path / "b", "b") as there,
    ):
        there.publish_tokens(PROMPT)
        here.receiver._channels = PeerChannels(PoolDialer("a guess"))
        with pytest.raises(PeerUnreachable):
            await here.fetch_from(there, PROMPT)
        assert there.sender.block_counters["baton_pool_sent_blocks_total"] == 0


@pytest.mark.asyncio
async def test_rejoin_fails_fetches_in_flight(tmp_path: Path) -> None:
    async with stalled_fetch(tmp_path) as (here, _, fetching):
        here.receiver.rejoin(Incarnation("the next life"))
        with pytest.raises(StaleMessage):
            await fetching
