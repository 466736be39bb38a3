"""When another host's pool is asked, and what is made of its answer: over a fetch that does as it is told."""

import asyncio
from collections.abc import Sequence

import pytest

from baton.errors import BatonError, Incomplete, PeerGone
from baton.kv_layout import KVLayout
from baton.pool_terms import Elsewhere
from baton.types import Incarnation, NodeName, PeerAddress
from kv_pool.arrivals import Arrivals, Wanted
from kv_pool.core.chain import Chain
from kv_pool.core.eviction import Lru
from kv_pool.core.holders import Found, Holder, Publication
from kv_pool.core.peer_book import REST
from kv_pool.core.pool import Pool
from kv_pool.core.tier import Tier
from kv_pool.promotions import Promotions
from tests.unit.pool_core.prompts import SIZE, of_blocks

pytestmark = pytest.mark.asyncio

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=SIZE, dtype="float32")
THERE = PeerAddress(NodeName("pool-1"), Incarnation("there"), "host-b", "b:1")
NODE = Holder("node")
PROMPT = of_blocks(1, 2, 3, 4)


class Scene:
    """A pool of 8 blocks; `pool-1` has `tokens` of every prompt."""

    def __init__(self, tokens: int = 3 * SIZE, token_seconds: float = 1.0) -> None:
        self.now, self.joined = 0.0, True
        self.error: BatonError | None = None
        self.go = asyncio.Event()
        self.asked: list[Publication] = []
        self.elsewhere = Elsewhere(THERE, tokens, token_seconds)
        self.pool = Pool(Tier(8, SIZE, Lru(8)))
        self.pool.attach(NODE, 0.0)
        self.arrivals = Arrivals(self.pool, lambda: self.now, carry_out=lambda moves: None, sealed=lambda *_: None)
        self.promotions = Promotions(self, LAYOUT, self._checksums, lambda: self.now)
        self.arrivals.sources.append(self.promotions)

    async def fetch(self, peer: PeerAddress, written: Publication) -> None:
        self.asked.append(written)
        await self.go.wait()
        if self.error is not None:
            raise self.error

    async def _checksums(self, blocks: Sequence[int]) -> Sequence[int]:
        return [0] * len(blocks)

    def found(self, chain: Chain = PROMPT) -> Found:
        found = self.pool.find(NODE, chain, len(chain) * SIZE, self.now, partial=False)
        if found.pin is not None:
            self.pool.release(NODE, found.pin)
        return found

    async def ask(self, chain: Chain = PROMPT) -> int:
        """Blocks that are here in the end."""
        arrival = self.arrivals.expect(chain, self.found(chain), len(chain), None, self.elsewhere)
        if arrival is not None:
            await asyncio.sleep(0)
            self.go.set()
            await arrival.over.wait()
        return len(self.found(chain).blocks)


async def test_what_the_other_has_comes_once_for_all_who_ask() -> None:
    scene = Scene()
    assert await asyncio.gather(*(scene.ask() for _ in range(4))) == [3] * 4
    assert [(one.first, len(one.blocks)) for one in scene.asked] == [(0, 3)]
    assert await scene.ask() == 3
    scene.elsewhere = Elsewhere(THERE, 4 * SIZE, 1.0)
    assert await scene.ask() == 4
    assert [(one.first, len(one.blocks)) for one in scene.asked] == [(0, 3), (3, 1)]
    assert scene.promotions.counters["baton_pool_promotions_done_total"] == 2
    assert scene.promotions.counters["baton_pool_promoted_bytes_total"] == 4 * LAYOUT.block_bytes
    scene.pool.check()


@pytest.mark.parametrize("token_seconds", [0.0, 1e-9])
async def test_what_computing_does_as_quickly_is_not_fetched(token_seconds: float) -> None:
    scene = Scene(token_seconds=token_seconds)
    assert await scene.ask() == 0
    assert scene.promotions.counters == {'baton_pool_promotions_declined_total{reason="slower"}': 1}


async def test_without_a_coordinator_nobody_is_asked() -> None:
    scene = Scene()
    scene.joined = False
    assert await scene.ask() == 0
    assert scene.asked == []


@pytest.mark.parametrize(("error", "rests"), [(PeerGone("it is gone"), True), (Incomplete("it has 2 of 3"), False)])
async def test_a_failure_is_a_miss_and_who_is_gone_rests(error: BatonError, *, rests: bool) -> None:
    scene = Scene()
    scene.error = error
    assert await scene.ask() == 0
    assert scene.promotions.counters[f'baton_pool_promotions_failed_total{{reason="{error.code}"}}'] == 1
    assert scene.pool.memory.num_free == 8
    scene.error = None
    assert await scene.ask() == (0 if rests else 3)
    scene.now += REST
    assert await scene.ask() == 3


async def test_while_one_fetch_takes_too_long_no_other_is_begun() -> None:
    scene = Scene()
    late = scene.arrivals.expect(PROMPT, scene.found(), 4, None, scene.elsewhere)
    assert late is not None
    await asyncio.sleep(0)
    other = of_blocks(7, 8, 9)
    scene.now = late.patience
    assert await scene.ask(other) == 0
    scene.go.set()
    await late.over.wait()
    assert await scene.ask(other) == 0, "it is known to be slow now"
    scene.elsewhere = Elsewhere(THERE, 3 * SIZE, 10.0)
    assert await scene.ask(other) == 3


async def test_no_more_is_asked_for_than_is_wanted() -> None:
    scene = Scene(tokens=100 * SIZE)
    assert scene.promotions.offer(Wanted(PROMPT, 1, 2, None, scene.elsewhere), 0.0) is not None
    assert await scene.ask() == 4
