"""What is on its way into memory, and who waits for it: over the pool's core, with a source that does as it is told."""

import asyncio
from collections.abc import Sequence

import pytest

from baton.errors import PeerGone
from kv_pool.arrivals import HOLDER, Arrival, Arrivals, Offer, Wanted
from kv_pool.core.chain import Chain
from kv_pool.core.eviction import Lru
from kv_pool.core.holders import Found, Holder, Publication
from kv_pool.core.ledger import PoolState
from kv_pool.core.pool import Pool
from kv_pool.core.tier import Tier
from tests.unit.pool_core.prompts import SIZE, fill, of_blocks

pytestmark = pytest.mark.asyncio

NODE = Holder("node")
PROMPT = of_blocks(1, 2, 3, 4)


class Elsewhere:
    """Has `end` blocks of every chain, of which `whole` come when the test lets them."""

    def __init__(self, end: int, whole: int | Exception) -> None:
        self.end, self.whole = end, whole
        self.go = asyncio.Event()
        self.fetched: list[Publication] = []
        self.let_go = 0

    def offer(self, wanted: Wanted, now: float) -> Offer | None:
        if wanted.first >= self.end:
            return None
        return Offer("elsewhere", min(self.end, wanted.end), 1.0, self._fetch, self._let_go)

    async def _fetch(self, publication: Publication) -> Sequence[int]:
        self.fetched.append(publication)
        await self.go.wait()
        if isinstance(self.whole, Exception):
            raise self.whole
        return range(self.whole)

    def _let_go(self) -> None:
        self.let_go += 1


class Rig:
    def __init__(self, source: Elsewhere, blocks: int = 8) -> None:
        self.now = 0.0
        self.pool = Pool(Tier(blocks, SIZE, Lru(blocks)))
        self.pool.attach(NODE, 0.0)
        self.sealed: list[tuple[list[int], list[int]]] = []
        self.arrivals = Arrivals(
            self.pool,
            lambda: self.now,
            carry_out=lambda moves: None,
            sealed=lambda blocks, sums: self.sealed.append((list(blocks), list(sums))),
        )
        self.arrivals.sources.append(source)

    def find(self, chain: Chain) -> Found:
        return self.pool.find(NODE, chain, len(chain) * SIZE, 0.0, partial=False)

    def expect(self, chain: Chain, most: int | None = None) -> Arrival | None:
        found = self.find(chain)
        if found.pin is not None:
            self.pool.release(NODE, found.pin)
        return self.arrivals.expect(chain, found, len(chain) if most is None else most, None)


async def test_what_arrives_is_found_and_pinned_for_whoever_waits() -> None:
    source = Elsewhere(3, 3)
    rig = Rig(source)
    fill(rig.pool.memory, of_blocks(1))
    arrival = rig.expect(PROMPT)
    assert arrival is not None
    assert arrival.blocks == 2
    assert not arrival.over.is_set()
    counts = rig.pool.ledger(0.0).counts
    assert counts[PoolState.WRITING] == 2
    assert len(rig.find(PROMPT).blocks) == 1
    source.whole = 2
    source.go.set()
    await arrival.over.wait()
    found = rig.find(PROMPT)
    assert len(found.blocks) == 3
    assert rig.sealed == [(list(found.blocks)[1:], [0, 1])]
    await asyncio.sleep(0)
    assert {entry.holder for entry in rig.pool.ledger(0.0).entries} == {NODE}
    assert source.let_go == 1
    rig.pool.check()


async def test_two_that_lack_the_same_block_wait_for_the_same_arrival() -> None:
    source = Elsewhere(2, 2)
    rig = Rig(source)
    first = rig.expect(PROMPT)
    assert rig.expect(of_blocks(1, 2, 9)) is first is not None
    assert rig.expect(of_blocks(7, 8)) is not first
    source.go.set()
    await first.over.wait()
    assert len(rig.find(of_blocks(1, 2, 9)).blocks) == 2


@pytest.mark.parametrize(("whole", "found"), [(1, 1), (0, 0), (PeerGone("it is gone"), 0), (ValueError("a defect"), 0)])
async def test_what_is_not_whole_never_comes_and_its_places_are_free(whole: int | Exception, found: int) -> None:
    source = Elsewhere(4, whole)
    rig = Rig(source)
    arrival = rig.expect(PROMPT)
    assert arrival is not None
    source.go.set()
    await arrival.over.wait()
    assert len(rig.find(PROMPT).blocks) == found
    assert rig.arrivals.counters["baton_pool_load_failures_total"] == 1
    assert rig.pool.memory.num_free == 8 - found
    assert source.let_go == 1
    assert rig.expect(PROMPT) is not arrival, "it can be tried again"


async def test_an_asker_that_ends_ends_no_arrival() -> None:
    source = Elsewhere(4, 4)
    rig = Rig(source)
    arrival = rig.expect(PROMPT)
    assert arrival is not None
    rig.pool.gone(NODE)
    source.go.set()
    await arrival.over.wait()
    rig.pool.attach(NODE, 0.0)
    assert len(rig.find(PROMPT).blocks) == 4


async def test_nobody_new_waits_for_an_arrival_that_takes_too_long() -> None:
    source = Elsewhere(2, 2)
    rig = Rig(source)
    arrival = rig.expect(PROMPT)
    assert arrival is not None
    rig.now = arrival.patience
    assert rig.expect(PROMPT) is None
    source.go.set()
    await arrival.over.wait()
    assert len(rig.find(PROMPT).blocks) == 2


async def test_no_room_no_arrival() -> None:
    source = Elsewhere(4, 4)
    rig = Rig(source, blocks=2)
    fill(rig.pool.memory, of_blocks(8, 9))
    pinned = rig.find(of_blocks(8, 9))
    assert rig.expect(PROMPT) is None
    assert source.let_go == 1
    assert pinned.pin is not None
    rig.pool.release(NODE, pinned.pin)
    arrival = rig.expect(PROMPT)
    assert arrival is not None
    assert arrival.blocks == 2, "as many as there is room for"


async def test_nothing_is_wanted_of_what_is_here_or_beyond_what_was_asked() -> None:
    rig = Rig(Elsewhere(4, 4))
    fill(rig.pool.memory, of_blocks(1, 2))
    assert rig.expect(PROMPT, most=2) is None
    assert rig.expect(of_blocks(1, 2)) is None
    assert rig.arrivals.expect(PROMPT, Found(None, rig.pool.memory.index.match(PROMPT)), 3, None) is not None
    assert HOLDER in {entry.holder for entry in rig.pool.ledger(0.0).entries}
    await rig.arrivals.close()
