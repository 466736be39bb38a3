"""The pool tells the coordinator what it has in parts, each when the last is on its way."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from baton.cluster_link.messages import NodeLeaving
from baton.config.settings import Config
from baton.kv.blocks import BlockHash
from baton.kv.cache_journal import MAX_HASHES_PER_BATCH, CacheJournal
from baton.process.clock import FakeClock
from baton.types import Incarnation
from kv_pool import cluster_member as membership

TOTAL = 2 * MAX_HASHES_PER_BATCH + 3


class FakeCoordinatorLink:
    """What is sent stays until the test writes it."""

    is_joined = True

    def __init__(self, *_: object, **__: object) -> None:
        self.sent: list[Any] = []
        self.asked = 0
        self.waiting = asyncio.Semaphore(0)
        self.is_closed = False

    def send(self, message: Any, incarnation: object) -> None:
        self.sent.append(message)

    async def wait_until_flushed(self) -> None:
        self.asked += 1
        await self.waiting.acquire()

    async def close(self) -> None:
        self.is_closed = True


class FakeCachePoolManager:
    def __init__(self) -> None:
        self.cache_journal = CacheJournal()
        memory = SimpleNamespace(num_blocks=TOTAL)
        self.open_pool = SimpleNamespace(
            block_pool=SimpleNamespace(memory=memory), list_block_hashes=self._list_block_hashes
        )
        self.largest_request = 0

    def _list_block_hashes(self, first: int, last: int) -> Iterator[BlockHash]:
        self.largest_request = max(self.largest_request, last - first)
        return (
            BlockHash(block.to_bytes(8, "big") + bytes(24))
            for block in range(first, min(last, TOTAL))
        )


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> membership.PoolClusterMember:
    monkeypatch.setattr(membership, "CoordinatorLink", FakeCoordinatorLink)
    host: Any = FakeCachePoolManager()
    peers: Any = SimpleNamespace(rejoin=lambda _: None)
    return membership.PoolClusterMember(Config(), "pool-0", host, peers, "127.0.0.1:1", FakeClock())


@pytest.mark.asyncio
async def test_a_snapshot_is_made_part_by_part(member: membership.PoolClusterMember) -> None:
    link: Any = member._link
    host: Any = member._manager
    member.on_joined(Incarnation("i"))
    counts = []
    for _ in range(3):
        await asyncio.sleep(0)
        counts.append(len(link.sent))
        link.waiting.release()
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert counts == [1, 2, 3], "one part, and no more before it is written"
    assert host.largest_request == MAX_HASHES_PER_BATCH
    first, *others = link.sent
    assert len(first.block_hashes) == MAX_HASHES_PER_BATCH
    assert [len(batch.inserted) for batch in others] == [MAX_HASHES_PER_BATCH, 3]


@pytest.mark.asyncio
async def test_close_stops_the_snapshot_and_closes_the_link_after_the_last_message(
    member: membership.PoolClusterMember,
) -> None:
    link: Any = member._link
    member.on_joined(Incarnation("i"))
    await asyncio.sleep(0)
    member.send_leaving()
    await member.close()
    link.waiting.release()
    for _ in range(3):
        await asyncio.sleep(0)
    _, leaving = link.sent
    assert isinstance(leaving, NodeLeaving), "no part of the snapshot comes after it"
    assert link.is_closed
