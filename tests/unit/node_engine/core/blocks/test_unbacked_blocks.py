"""Blocks that have no memory yet: they get it before they are used, or are removed."""

import pytest

from baton.process.clock import FakeClock
from baton.types import BlockIndex, TicketId
from node_engine.core.blocks.block_pool import BlockPool
from node_engine.core.blocks.block_records import BlockLedgerError, BlockState

SIZE = 4


class FakeMemory:
    """Memory of an arena that can be allocated for `limit` blocks."""

    def __init__(self, num_backed: int, limit: int) -> None:
        self.num_backed, self.limit = num_backed, limit

    def back_blocks(self, count: int) -> int:
        self.num_backed = max(self.num_backed, min(count, self.limit))
        return self.num_backed


def make_pool(num_blocks: int, memory: FakeMemory) -> BlockPool:
    return BlockPool(num_blocks, SIZE, FakeClock(), memory.back_blocks)


def check_ledger(pool: BlockPool, num_blocks: int) -> None:
    pool.check_invariants()
    ledger = pool.take_ledger()
    assert ledger.is_balanced
    assert ledger.num_blocks == pool.num_blocks == num_blocks


def test_blocks_without_memory_count_as_available_and_get_it_when_they_are_taken() -> None:
    memory = FakeMemory(num_backed=2, limit=8)
    pool = make_pool(8, memory)
    assert pool.num_available_blocks == 8
    assert pool.allocate_blocks(2, "a") == (0, 1)
    assert memory.num_backed == 2, "the blocks that had memory are enough"
    assert pool.allocate_blocks(3, "b") == (2, 3, 4)
    assert memory.num_backed == 5
    assert pool.reservations.reserve_for_ticket(2, TicketId("t"), "c") == (5, 6)
    assert memory.num_backed == 7
    check_ledger(pool, 8)


def test_an_allocation_that_finds_no_memory_gets_blocks_that_have_some() -> None:
    memory = FakeMemory(num_backed=2, limit=5)
    pool = make_pool(8, memory)
    held = pool.allocate_blocks(4, "a")
    assert held is not None
    assert pool.allocate_blocks(2, "b") is None
    check_ledger(pool, 5)
    assert pool.num_available_blocks == 1
    pool.release_blocks(held, "a")
    assert pool.allocate_blocks(5, "b") == (0, 1, 2, 3, 4)
    check_ledger(pool, 5)


def test_blocks_without_memory_are_removed_while_others_are_in_use() -> None:
    memory = FakeMemory(num_backed=4, limit=4)
    pool = make_pool(8, memory)
    assert pool.allocate_blocks(3, "a") == (0, 1, 2)
    pool.remove_unbacked_blocks()
    check_ledger(pool, 4)
    pool.remove_unbacked_blocks()
    check_ledger(pool, 4)
    assert pool.allocate_blocks(1, "b") == (3,)
    assert pool.allocate_blocks(1, "b") is None
    assert not pool.is_own_block(BlockIndex(8)), "the first block of the shared pool"


def test_a_pool_with_all_its_memory_removes_nothing() -> None:
    pool = BlockPool(8, SIZE, FakeClock())
    pool.remove_unbacked_blocks()
    check_ledger(pool, 8)


def test_a_block_that_is_not_free_cannot_be_removed() -> None:
    pool = BlockPool(8, SIZE, FakeClock())
    pool.allocate_blocks(6, "a")
    with pytest.raises(BlockLedgerError, match="not free"):
        pool.ownership.remove_free_blocks(5)
    assert pool.ownership.count_blocks(BlockState.FREE) == 2
