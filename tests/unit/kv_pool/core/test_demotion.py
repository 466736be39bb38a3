"""What goes to disk, in which order, and what comes back."""

import pytest

from baton.types import BlockIndex
from kv_pool.core.blocks.attachments import PoolClientId
from kv_pool.core.blocks.cache_tier import CacheTier
from kv_pool.core.blocks.demotion import Demotion
from kv_pool.core.blocks.shared_block_pool import SharedBlockPool
from kv_pool.core.disk.load_cost import DEFAULT_COMPUTE_SECONDS, LoadCostModel
from kv_pool.core.eviction.evictor import LruEvictor
from kv_pool.core.index.radix_index import PromptChain
from tests.unit.kv_pool.core.chains import PROMPT_BLOCK_TOKENS, insert_chain, make_block_chain

CLIENT_ID = PoolClientId("node")


def make_pool(memory: int, disk: int) -> SharedBlockPool:
    pool = SharedBlockPool(
        CacheTier(memory, PROMPT_BLOCK_TOKENS, LruEvictor(memory)),
        CacheTier(disk, PROMPT_BLOCK_TOKENS, LruEvictor(disk)),
    )
    pool.attachments.attach_client(CLIENT_ID, 0.0)
    return pool


def test_used_blocks_are_demoted_with_their_ancestors() -> None:
    pool = make_pool(4, 8)
    path = insert_chain(pool.memory, make_block_chain(1, 2, 3))
    pool.memory.match_prefix(make_block_chain(1, 2), 1.0)
    unused = insert_chain(pool.memory, make_block_chain(9), 2.0)
    assert pool.reserve_blocks(CLIENT_ID, make_block_chain(7, 8), 0, 3.0).blocks == (
        path[2],
        path[1],
    )
    moves = pool.take_demotions()
    assert moves == (Demotion(path[0], 0), Demotion(path[1], 1)), (
        "the third was never found, and is gone"
    )
    assert pool.take_demotions() == ()
    assert unused[0] in pool.memory.index
    assert pool.disk is not None
    assert list(pool.disk.match_prefix(make_block_chain(1, 2, 3), 4.0)) == [0, 1]
    found = pool.find_prefix(CLIENT_ID, make_block_chain(1, 2, 3), 100, 5.0)
    assert list(found.blocks) == [path[0]]
    assert list(pool.find_on_disk(make_block_chain(1, 2, 3), len(found.blocks), 3, 5.0)) == [1]


def test_small_disk_keeps_the_leading_blocks() -> None:
    pool = make_pool(3, 2)
    insert_chain(pool.memory, make_block_chain(1, 2, 3))
    pool.memory.match_prefix(make_block_chain(1, 2, 3), 1.0)
    pool.reserve_blocks(CLIENT_ID, make_block_chain(7), 0, 2.0)
    assert [move.disk_slot for move in pool.take_demotions()] == [0, 1]
    pool.memory.check()
    assert pool.disk is not None
    pool.disk.check()


def test_disk_blocks_are_loaded_as_a_publication() -> None:
    pool, prompt = make_pool(3, 8), make_block_chain(1, 2, 3)
    insert_chain(pool.memory, prompt)
    pool.memory.match_prefix(prompt, 1.0)
    other = pool.reserve_blocks(CLIENT_ID, make_block_chain(7, 8), 0, 2.0)
    pool.take_demotions()
    assert other.publication_id is not None
    pool.withdraw_publication(CLIENT_ID, other.publication_id)
    found = pool.find_prefix(CLIENT_ID, prompt, 100, 3.0)
    more = pool.find_on_disk(prompt, len(found.blocks), len(prompt), 3.0)
    granted = pool.reserve_blocks(
        CLIENT_ID, prompt, len(found.blocks), 3.0, end=len(found.blocks) + len(more)
    )
    assert granted.publication_id is not None
    sealed = pool.seal_publication(
        CLIENT_ID, granted.publication_id, 1, 4.0
    )  # the second one's checksum was wrong
    assert len(sealed.blocks) == len(found.blocks) + 1
    pool.check()


def test_load_is_chosen_when_faster_than_recompute() -> None:
    worth = LoadCostModel()
    worth.rate.record_load(1 << 30, wait_seconds=0.001, read_seconds=1.0, now=0.0)
    assert worth.max_wait_seconds(0, 1024, 50_000_000, 1e-4, 1.0) == pytest.approx(0.1024, rel=0.01)
    assert worth.max_wait_seconds(0, 16, 50_000_000, 1e-4, 1.0) is None
    assert worth.max_wait_seconds(0, 1024, 120_000_000, 1e-4, 1.0) is None
    assert worth.max_wait_seconds(65536, 1024, 120_000_000, 1e-4, 1.0), (
        "behind a long context a token costs half as much again"
    )


def test_load_is_tried_while_rates_are_unknown() -> None:
    worth = LoadCostModel()
    assert worth.max_wait_seconds(0, 16, 1 << 30, None, 0.0) == DEFAULT_COMPUTE_SECONDS
    assert worth.max_wait_seconds(0, 16, 1 << 30, 1e-4, 0.0), "no disk has been measured"
    worth.rate.record_load(1 << 20, wait_seconds=0.0, read_seconds=1.0, now=0.0)
    assert worth.max_wait_seconds(0, 16, 1 << 30, None, 0.0) is None, "as another node told"
    assert worth.max_wait_seconds(0, 16, 1 << 30, None, 61.0), "a slow moment is not for ever"


def test_demotions_are_bounded_and_take_ancestors_first() -> None:
    pool = make_pool(4, 8)
    assert pool.disk is not None
    pool.mount_disk(pool.disk, lambda: 3)
    insert_chain(pool.memory, make_block_chain(1, 2, 3, 4))
    pool.memory.match_prefix(make_block_chain(1, 2, 3, 4), 1.0)
    pool.reserve_blocks(CLIENT_ID, make_block_chain(7, 8), 0, 2.0)
    assert [move.disk_slot for move in pool.take_demotions()] == [0, 1, 2]
    assert pool.dropped_demotions == 1
    assert list(pool.disk.match_prefix(make_block_chain(1, 2, 3, 4), 3.0)) == [0, 1, 2]
    pool.mount_disk(None, lambda: 3)
    pool.reserve_blocks(CLIENT_ID, make_block_chain(5, 6), 0, 4.0)
    assert pool.take_demotions() == ()


def test_full_disk_is_tried_once_per_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A try costs as much as the prompt is long, and there may be thousands of victims."""
    pool = make_pool(8, 3)
    prompt = make_block_chain(1, 2, 3, 4, 5, 6, 7, 8)
    insert_chain(pool.memory, prompt)
    assert pool.disk is not None
    insert_chain(pool.disk, prompt)
    pool.memory.match_prefix(prompt, 1.0)
    tried: list[int] = []
    chain = pool.memory.index.chain

    def count_chain(block: BlockIndex) -> PromptChain:
        tried.append(block)
        return chain(block)

    monkeypatch.setattr(pool.memory.index, "chain", count_chain)
    for number in (1, 2):
        granted = pool.reserve_blocks(CLIENT_ID, make_block_chain(*range(20, 24)), 0, 2.0)
        assert pool.take_demotions() == ()
        assert len(tried) == number
        assert pool.dropped_demotions == 4 * number
        assert granted.publication_id is not None
        pool.withdraw_publication(CLIENT_ID, granted.publication_id)
        insert_chain(pool.memory, prompt, 3.0)
        pool.memory.match_prefix(prompt, 4.0)
    pool.disk.check()


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_demotion_evicted_at_once_is_not_copied(slots: int) -> None:
    """Else the journal would have, for a moment, one block's checksum under another one's name."""
    pool = make_pool(4, slots)
    for prompt in (make_block_chain(1, 2), make_block_chain(3, 4)):
        insert_chain(pool.memory, prompt)
        pool.memory.match_prefix(prompt, 1.0)
    names = [pool.memory.index.block_hash(block) for block in range(4)]
    pool.reserve_blocks(CLIENT_ID, make_block_chain(7, 8, 9, 10), 0, 2.0)
    moves = pool.take_demotions()
    assert pool.disk is not None
    assert len({move.disk_slot for move in moves}) == len(moves) == slots
    for move in moves:
        assert pool.disk.index.block_hash(move.disk_slot) == names[move.memory_block]
    pool.disk.check()


def test_subtree_is_removed_unless_pinned() -> None:
    pool = make_pool(3, 8)
    assert pool.disk is not None
    disk = pool.disk
    insert_chain(disk, make_block_chain(1, 2, 3))
    insert_chain(disk, make_block_chain(1, 2, 4, 5))
    (second,) = disk.match_prefix(make_block_chain(1, 2), 1.0)[1:]
    deepest = disk.match_prefix(make_block_chain(1, 2, 4, 5), 1.0)[-1]
    disk.pin(deepest)
    disk.remove_subtree(second)
    assert len(disk.index) == 5
    disk.unpin(deepest)
    disk.remove_subtree(second)
    assert len(disk.index) == 1
    disk.remove_subtree(second)
    disk.check()
