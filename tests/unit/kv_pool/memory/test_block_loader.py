"""What is on its way into memory, and who waits for it: over the pool's core, with a source that
does as it is told."""

import asyncio
from collections.abc import Sequence

import pytest

from baton.errors import PeerUnreachable
from kv_pool.core.blocks.attachments import PoolClientId, PoolMatch, Publication
from kv_pool.core.blocks.cache_tier import CacheTier
from kv_pool.core.blocks.shared_block_pool import SharedBlockPool
from kv_pool.core.eviction.evictor import LruEvictor
from kv_pool.core.index.radix_index import PromptChain
from kv_pool.core.ledger import PoolBlockState
from kv_pool.memory.pending_blocks import (
    LOADER_CLIENT_ID,
    BlockLoader,
    LoadPlan,
    LoadRequest,
    PendingBlocks,
)
from tests.unit.kv_pool.core.chains import PROMPT_BLOCK_TOKENS, insert_chain, make_block_chain

pytestmark = pytest.mark.asyncio

CLIENT_ID = PoolClientId("node")
PROMPT = make_block_chain(1, 2, 3, 4)


class ScriptedSource:
    """Has `end_block` blocks of every chain, of which `intact_blocks` come when the test lets
    them."""

    def __init__(self, end: int, whole: int | Exception) -> None:
        self.end_block, self.intact_blocks = end, whole
        self.go = asyncio.Event()
        self.fetched: list[Publication] = []
        self.num_done_calls = 0

    def plan_load(self, load_request: LoadRequest, now: float) -> LoadPlan | None:
        if load_request.first_block >= self.end_block:
            return None
        end_block = min(self.end_block, load_request.end_block)
        return LoadPlan("elsewhere", end_block, 1.0, self._fetch, self._on_done)

    async def _fetch(self, publication: Publication) -> Sequence[int]:
        self.fetched.append(publication)
        await self.go.wait()
        if isinstance(self.intact_blocks, Exception):
            raise self.intact_blocks
        return range(self.intact_blocks)

    def _on_done(self) -> None:
        self.num_done_calls += 1


class LoaderRig:
    def __init__(self, source: ScriptedSource, blocks: int = 8) -> None:
        self.now = 0.0
        self.pool = SharedBlockPool(CacheTier(blocks, PROMPT_BLOCK_TOKENS, LruEvictor(blocks)))
        self.pool.attachments.attach_client(CLIENT_ID, 0.0)
        self.sealed: list[tuple[list[int], list[int]]] = []
        self.loader = BlockLoader(
            self.pool,
            lambda: self.now,
            stage_demotions=lambda moves: None,
            on_blocks_sealed=lambda blocks, sums: self.sealed.append((list(blocks), list(sums))),
        )
        self.loader.sources.append(source)

    def find_prefix(self, chain: PromptChain) -> PoolMatch:
        return self.pool.find_prefix(
            CLIENT_ID, chain, len(chain) * PROMPT_BLOCK_TOKENS, 0.0, partial=False
        )

    def find_or_start_load(
        self, chain: PromptChain, most: int | None = None
    ) -> PendingBlocks | None:
        found = self.find_prefix(chain)
        if found.pin_id is not None:
            self.pool.release_pin(CLIENT_ID, found.pin_id)
        return self.loader.find_or_start_load(
            chain, found, len(chain) if most is None else most, None
        )


async def test_loaded_blocks_are_found_and_pinned_for_waiters() -> None:
    source = ScriptedSource(3, 3)
    rig = LoaderRig(source)
    insert_chain(rig.pool.memory, make_block_chain(1))
    pending = rig.find_or_start_load(PROMPT)
    assert pending is not None
    assert pending.num_blocks == 2
    assert not pending.done_event.is_set()
    counts = rig.pool.ledger(0.0).counts
    assert counts[PoolBlockState.WRITING] == 2
    assert len(rig.find_prefix(PROMPT).blocks) == 1
    source.intact_blocks = 2
    source.go.set()
    await pending.done_event.wait()
    found = rig.find_prefix(PROMPT)
    assert len(found.blocks) == 3
    assert rig.sealed == [(list(found.blocks)[1:], [0, 1])]
    await asyncio.sleep(0)
    assert {entry.owner for entry in rig.pool.ledger(0.0).entries} == {CLIENT_ID}
    assert source.num_done_calls == 1
    rig.pool.check()


async def test_lookups_missing_the_same_block_share_a_load() -> None:
    source = ScriptedSource(2, 2)
    rig = LoaderRig(source)
    first = rig.find_or_start_load(PROMPT)
    assert rig.find_or_start_load(make_block_chain(1, 2, 9)) is first is not None
    assert rig.find_or_start_load(make_block_chain(7, 8)) is not first
    source.go.set()
    await first.done_event.wait()
    assert len(rig.find_prefix(make_block_chain(1, 2, 9)).blocks) == 2


@pytest.mark.parametrize(
    ("whole", "found"),
    [(1, 1), (0, 0), (PeerUnreachable("it is gone"), 0), (ValueError("a defect"), 0)],
)
async def test_corrupt_blocks_are_not_indexed_and_their_places_are_freed(
    whole: int | Exception, found: int
) -> None:
    source = ScriptedSource(4, whole)
    rig = LoaderRig(source)
    pending = rig.find_or_start_load(PROMPT)
    assert pending is not None
    source.go.set()
    await pending.done_event.wait()
    assert len(rig.find_prefix(PROMPT).blocks) == found
    assert rig.loader.counters["baton_pool_load_failures_total"] == 1
    assert len(rig.pool.memory.free_list) == 8 - found
    assert source.num_done_calls == 1
    assert rig.find_or_start_load(PROMPT) is not pending, "it can be tried again"


async def test_load_outlives_the_client_that_started_it() -> None:
    source = ScriptedSource(4, 4)
    rig = LoaderRig(source)
    pending = rig.find_or_start_load(PROMPT)
    assert pending is not None
    rig.pool.remove_client(CLIENT_ID)
    source.go.set()
    await pending.done_event.wait()
    rig.pool.attachments.attach_client(CLIENT_ID, 0.0)
    assert len(rig.find_prefix(PROMPT).blocks) == 4


async def test_overdue_load_gets_no_new_waiters() -> None:
    source = ScriptedSource(2, 2)
    rig = LoaderRig(source)
    pending = rig.find_or_start_load(PROMPT)
    assert pending is not None
    rig.now = pending.max_wait_seconds
    assert rig.find_or_start_load(PROMPT) is None
    source.go.set()
    await pending.done_event.wait()
    assert len(rig.find_prefix(PROMPT).blocks) == 2


async def test_no_load_without_room() -> None:
    source = ScriptedSource(4, 4)
    rig = LoaderRig(source, blocks=2)
    insert_chain(rig.pool.memory, make_block_chain(8, 9))
    pinned = rig.find_prefix(make_block_chain(8, 9))
    assert rig.find_or_start_load(PROMPT) is None
    assert source.num_done_calls == 1
    assert pinned.pin_id is not None
    rig.pool.release_pin(CLIENT_ID, pinned.pin_id)
    pending = rig.find_or_start_load(PROMPT)
    assert pending is not None
    assert pending.num_blocks == 2, "as many as there is room for"


async def test_load_covers_only_missing_and_requested_blocks() -> None:
    rig = LoaderRig(ScriptedSource(4, 4))
    insert_chain(rig.pool.memory, make_block_chain(1, 2))
    assert rig.find_or_start_load(PROMPT, most=2) is None
    assert rig.find_or_start_load(make_block_chain(1, 2)) is None
    assert (
        rig.loader.find_or_start_load(
            PROMPT, PoolMatch(None, rig.pool.memory.index.match_prefix(PROMPT)), 3, None
        )
        is not None
    )
    assert LOADER_CLIENT_ID in {entry.owner for entry in rig.pool.ledger(0.0).entries}
    await rig.loader.close()
