"""Blocks from one pool to another: all of them or none, whatever happens, and nothing is held afterwards."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from baton.block_hash import root_hash
from baton.errors import BatonError, ChecksumMismatch, HandoffFailed, Incomplete, LeaseExpired, PeerGone, Stale
from baton.types import Incarnation
from kv_pool.link import Channels, Dialer
from tests.pool.ends import End, end
from tests.pool.rig import DIGEST, LAYOUT, expected, tokens_of, until

PROMPT = tokens_of(1, 20)


@asynccontextmanager
async def stuck(folder: Path) -> AsyncIterator[tuple[End, End, asyncio.Task[None]]]:
    """Who asks, who is asked, and a fetch that does not end: its seal is lost, and no time-out comes soon."""
    async with end(folder / "a", "a") as here, end(folder / "b", "b") as there:
        there.put(PROMPT)
        there.failpoints.arm("transfer.seal.before=drop*1")
        fetching = asyncio.create_task(here.fetch(there, PROMPT))
        await until("asked", lambda: there.pool.ledger(0.0).entries)
        yield here, there, fetching


@pytest.mark.asyncio
@pytest.mark.parametrize("transport", ["zmq", "grpc"])
async def test_blocks_arrive_as_they_were(tmp_path: Path, transport: str) -> None:
    async with end(tmp_path / "a", "a", transport) as here, end(tmp_path / "b", "b", transport) as there:
        there.put(PROMPT)
        await here.fetch(there, PROMPT, end=12)
        assert here.has(PROMPT) == expected(PROMPT)[:12]
        await here.fetch(there, PROMPT)
        assert here.has(PROMPT) == expected(PROMPT), "the rest goes on where that ended"
        await until("told so", lambda: there.sender.totals["baton_pool_sent_blocks_total"] == 20)


@pytest.mark.asyncio
async def test_what_fails_is_a_miss_and_leaks_nothing(tmp_path: Path) -> None:
    async with end(tmp_path / "a", "a") as here, end(tmp_path / "b", "b") as there:
        there.put(PROMPT[: 10 * LAYOUT.block_size])
        with pytest.raises(Incomplete, match="10 of 20"):
            await here.fetch(there, PROMPT)
        there.failpoints.arm("transfer.write.before=corrupt*1")
        with pytest.raises(ChecksumMismatch):
            await here.fetch(there, PROMPT, end=10)
        here.failpoints.arm("transfer.land.before=error*1")
        with pytest.raises(BatonError):
            await here.fetch(there, PROMPT, end=10)
        stale = replace(there.address, incarnation=Incarnation("an earlier life"))
        there.address, address = stale, there.address
        with pytest.raises(Stale, match="earlier life"):
            await here.fetch(there, PROMPT, end=10)
        there.address = address
        assert here.has(PROMPT) == []
        for one in (here, there):
            await one.at_rest()
        await here.fetch(there, PROMPT, end=10)
        assert here.has(PROMPT) == expected(PROMPT)[:10]


@pytest.mark.asyncio
async def test_another_tenants_blocks_are_not_sent(tmp_path: Path) -> None:
    async with end(tmp_path / "a", "a") as here, end(tmp_path / "b", "b") as there:
        there.put(PROMPT, root_hash(DIGEST, LAYOUT, b"another tenant's salt"))
        with pytest.raises(Incomplete, match="0 of 20"):
            await here.fetch(there, PROMPT)


@pytest.mark.asyncio
async def test_a_writer_that_stops_costs_its_lease(tmp_path: Path) -> None:
    """Its end of the plane stands still, as the process would."""
    async with end(tmp_path / "a", "a", ticket_ttl=0.3) as here, end(tmp_path / "b", "b") as there:
        there.put(PROMPT)
        there.failpoints.arm("transfer.write.before=delay(600)*1")
        with pytest.raises(LeaseExpired):
            await here.fetch(there, PROMPT)
        assert here.has(PROMPT) == []
        there.failpoints.resume()
        await there.at_rest()


@pytest.mark.asyncio
async def test_a_pool_that_dies_in_between_is_noticed_at_once(tmp_path: Path) -> None:
    async with stuck(tmp_path) as (here, there, fetching):
        await there.server.stop(None)
        with pytest.raises(HandoffFailed):
            await fetching
        assert here.has(PROMPT) == []
        with pytest.raises(PeerGone):
            await here.fetch(there, PROMPT)


@pytest.mark.asyncio
async def test_whoever_asks_no_further_is_sent_no_more(tmp_path: Path) -> None:
    """As when the asking pool dies, or gives a connection up that another question has failed on."""
    async with stuck(tmp_path) as (here, there, fetching):
        await here.receiver._channels.close()
        with pytest.raises(HandoffFailed):
            await fetching
        await there.at_rest()
        there.failpoints.arm("")  # the fetch may have been given up before its seal was due
        await here.fetch(there, PROMPT)


@pytest.mark.asyncio
async def test_whoever_has_not_the_token_is_not_heard(tmp_path: Path) -> None:
    async with end(tmp_path / "a", "a") as here, end(tmp_path / "b", "b") as there:
        there.put(PROMPT)
        here.receiver._channels = Channels(Dialer("a guess"))
        with pytest.raises(PeerGone):
            await here.fetch(there, PROMPT)
        assert there.sender.totals["baton_pool_sent_blocks_total"] == 0


@pytest.mark.asyncio
async def test_joining_anew_ends_what_is_under_way(tmp_path: Path) -> None:
    async with stuck(tmp_path) as (here, _, fetching):
        here.receiver.rejoin(Incarnation("the next life"))
        with pytest.raises(Stale):
            await fetching
