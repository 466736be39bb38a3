"""When another host's pool is asked, and what is made of its answer: over a fetch that does as it
is told."""

import asyncio
from collections.abc import Sequence

import pytest

from baton.errors import BatonError, IncompleteTransfer, PeerUnreachable
from baton.kv.blocks import KVLayout
from baton.kv.pool_types import RemotePrefix
from baton.types import Incarnation, NodeName, PeerAddress
from kv_pool.core.blocks.attachments import PoolClientId, PoolMatch, Publication
from kv_pool.core.blocks.cache_tier import CacheTier
from kv_pool.core.blocks.shared_block_pool import SharedBlockPool
from kv_pool.core.eviction.evictor import LruEvictor
from kv_pool.core.index.radix_index import PromptChain
from kv_pool.core.peers.fetch_estimator import MIN_BACKOFF_SECONDS
from kv_pool.memory.pending_blocks import BlockLoader, LoadRequest
from kv_pool.peers.promotion_source import PromotionSource
from tests.unit.kv_pool.core.chains import PROMPT_BLOCK_TOKENS, make_block_chain

pytestmark = pytest.mark.asyncio

LAYOUT = KVLayout(
    num_layers=2, num_kv_heads=1, head_dim=4, block_size=PROMPT_BLOCK_TOKENS, dtype="float32"
)
THERE = PeerAddress(NodeName("pool-1"), Incarnation("there"), "host-b", "b:1")
CLIENT_ID = PoolClientId("node")
PROMPT = make_block_chain(1, 2, 3, 4)


class PromotionRig:
    """A pool of 8 blocks; `pool-1` has `tokens` of every prompt."""

    def __init__(self, tokens: int = 3 * PROMPT_BLOCK_TOKENS, token_seconds: float = 1.0) -> None:
        self.now, self.is_joined = 0.0, True
        self.error: BatonError | None = None
        self.go = asyncio.Event()
        self.fetched_publications: list[Publication] = []
        self.remote_prefix = RemotePrefix(THERE, tokens, token_seconds)
        self.pool = SharedBlockPool(CacheTier(8, PROMPT_BLOCK_TOKENS, LruEvictor(8)))
        self.pool.attachments.attach_client(CLIENT_ID, 0.0)
        self.loader = BlockLoader(
            self.pool,
            lambda: self.now,
            stage_demotions=lambda moves: None,
            on_blocks_sealed=lambda *_: None,
        )
        self.promotions = PromotionSource(self, LAYOUT, self._checksums, lambda: self.now)
        self.loader.sources.append(self.promotions)

    async def fetch_blocks(self, peer: PeerAddress, written: Publication) -> None:
        self.fetched_publications.append(written)
        await self.go.wait()
        if self.error is not None:
            raise self.error

    async def _checksums(self, blocks: Sequence[int]) -> Sequence[int]:
        return [0] * len(blocks)

    def match_in_memory(self, chain: PromptChain = PROMPT) -> PoolMatch:
        found = self.pool.find_prefix(
            CLIENT_ID, chain, len(chain) * PROMPT_BLOCK_TOKENS, self.now, partial=False
        )
        if found.pin_id is not None:
            self.pool.release_pin(CLIENT_ID, found.pin_id)
        return found

    def fetched_ranges(self) -> list[tuple[int, int]]:
        """First block and number of blocks of each fetch."""
        return [
            (publication.first_block, len(publication.blocks))
            for publication in self.fetched_publications
        ]

    async def look_up(self, chain: PromptChain = PROMPT) -> int:
        """Blocks that are here in the end."""
        pending = self.loader.find_or_start_load(
            chain, self.match_in_memory(chain), len(chain), None, self.remote_prefix
        )
        if pending is not None:
            await asyncio.sleep(0)
            self.go.set()
            await pending.done_event.wait()
        return len(self.match_in_memory(chain).blocks)


async def test_concurrent_lookups_share_one_promotion() -> None:
    scene = PromotionRig()
    assert await asyncio.gather(*(scene.look_up() for _ in range(4))) == [3] * 4
    assert [
        (publication.first_block, len(publication.blocks))
        for publication in scene.fetched_publications
    ] == [(0, 3)]
    assert await scene.look_up() == 3
    scene.remote_prefix = RemotePrefix(THERE, 4 * PROMPT_BLOCK_TOKENS, 1.0)
    assert await scene.look_up() == 4
    assert [
        (publication.first_block, len(publication.blocks))
        for publication in scene.fetched_publications
    ] == [
        (0, 3),
        (3, 1),
    ]
    assert scene.promotions.counters["baton_pool_promotions_done_total"] == 2
    assert scene.promotions.counters["baton_pool_promoted_bytes_total"] == 4 * LAYOUT.block_bytes
    scene.pool.check()


@pytest.mark.parametrize("token_seconds", [0.0, 1e-9])
async def test_promotion_slower_than_recompute_is_declined(token_seconds: float) -> None:
    scene = PromotionRig(token_seconds=token_seconds)
    assert await scene.look_up() == 0
    assert scene.promotions.counters == {'baton_pool_promotions_declined_total{reason="slower"}': 1}


async def test_no_promotion_before_joining_the_coordinator() -> None:
    scene = PromotionRig()
    scene.is_joined = False
    assert await scene.look_up() == 0
    assert scene.fetched_publications == []


@pytest.mark.parametrize(
    ("error", "rests"),
    [(PeerUnreachable("it is gone"), True), (IncompleteTransfer("it has 2 of 3"), False)],
)
async def test_failed_promotion_is_a_miss_and_a_dead_peer_backs_off(
    error: BatonError, *, rests: bool
) -> None:
    scene = PromotionRig()
    scene.error = error
    assert await scene.look_up() == 0
    assert (
        scene.promotions.counters[f'baton_pool_promotions_failed_total{{reason="{error.code}"}}']
        == 1
    )
    assert len(scene.pool.memory.free_list) == 8
    scene.error = None
    assert await scene.look_up() == (0 if rests else 3)
    scene.now += MIN_BACKOFF_SECONDS
    assert await scene.look_up() == 3


async def test_no_second_fetch_from_an_overdue_peer() -> None:
    scene = PromotionRig()
    late = scene.loader.find_or_start_load(
        PROMPT, scene.match_in_memory(), 4, None, scene.remote_prefix
    )
    assert late is not None
    await asyncio.sleep(0)
    other = make_block_chain(7, 8, 9)
    scene.now = late.max_wait_seconds
    assert await scene.look_up(other) == 0
    scene.go.set()
    await late.done_event.wait()
    assert await scene.look_up(other) == 0, "it is known to be slow now"
    scene.remote_prefix = RemotePrefix(THERE, 3 * PROMPT_BLOCK_TOKENS, 10.0)
    assert await scene.look_up(other) == 3


async def test_promotion_is_limited_to_the_requested_blocks() -> None:
    scene = PromotionRig(tokens=100 * PROMPT_BLOCK_TOKENS)
    assert (
        scene.promotions.plan_load(LoadRequest(PROMPT, 1, 2, None, scene.remote_prefix), 0.0)
        is not None
    )
    assert await scene.look_up() == 4
