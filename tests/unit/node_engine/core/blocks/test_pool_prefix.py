"""Block tables that name the shared pool's blocks, without a pool: the books are kept on own blocks
only."""

import pytest

from baton.types import BlockIndex
from node_engine.core.blocks.block_pool import PartialHit
from node_engine.core.blocks.block_records import BlockLedgerError
from node_engine.core.blocks.pool_prefix import PoolPrefix, RefCountedPin
from node_engine.core.sequences.sequence import SequenceState
from tests.unit.node_engine.core.stepped_node import BLOCK, SteppedNode, make_work

PROMPT = tuple(range(1, 5 * BLOCK + 5))
POOL_BLOCKS = tuple(BlockIndex(1000 + number) for number in range(5))


class CountedPin:
    def __init__(self) -> None:
        self.num_released = 0

    def release(self) -> None:
        self.num_released += 1


def make_pool_prefix(pin: CountedPin, blocks: int, partial: int = 0) -> PoolPrefix:
    beginning = PartialHit(POOL_BLOCKS[blocks], partial) if partial else None
    return PoolPrefix(POOL_BLOCKS[:blocks], beginning, RefCountedPin(pin.release))


def test_a_pin_ends_with_its_last_user_and_once() -> None:
    pin = CountedPin()
    shared_pin = RefCountedPin(pin.release)
    shared_pin.acquire()
    shared_pin.release()
    assert (shared_pin.ref_count, pin.num_released) == (1, 0)
    shared_pin.release()
    assert pin.num_released == 1
    with pytest.raises(BlockLedgerError):
        shared_pin.release()
    with pytest.raises(BlockLedgerError):
        shared_pin.acquire()


def test_pool_blocks_use_no_own_blocks() -> None:
    node, pin = SteppedNode(num_blocks=6), CountedPin()
    found = make_pool_prefix(pin, 3, partial=7)
    sequence = node.scheduler.add_sequence(
        make_work(0, PROMPT), node.root, is_prefill_only=True, pool_prefix=found
    )
    found.release()
    node.scheduler.schedule_step()
    assert sequence.block_table[:3] == list(POOL_BLOCKS[:3])
    assert (
        sequence.pool_use.num_blocks,
        sequence.num_own_blocks,
        node.pool.num_available_blocks,
    ) == (
        3,
        3,
        3,
    )
    assert (sequence.num_cached_tokens, sequence.pool_use.num_tokens) == (
        3 * BLOCK + 7,
        3 * BLOCK + 7,
    )
    assert sequence.pending_copy == (POOL_BLOCKS[3], sequence.block_table[3])
    assert pin.num_released == 0


def test_a_pin_is_held_until_the_step_in_flight_has_ended() -> None:
    node, pin = SteppedNode(), CountedPin()
    found = make_pool_prefix(pin, 2)
    node.scheduler.add_sequence(make_work(0, PROMPT), node.root, pool_prefix=found)
    found.release()
    plan = node.scheduler.schedule_step()
    assert plan.batch is not None
    node.scheduler.cancel_sequence(make_work(0, PROMPT).key)
    assert pin.num_released == 0
    node.scheduler.abandon_step(plan.batch)
    assert pin.num_released == 1
    node.pool.check_invariants()
    assert node.pool.num_available_blocks == node.pool.num_blocks


def test_own_blocks_are_preferred_to_pool_blocks() -> None:
    node, pin = SteppedNode(), CountedPin()
    node.add_work(make_work(0, PROMPT[: 2 * BLOCK + 1], max_tokens=1))
    node.run()
    found = make_pool_prefix(pin, 4)
    sequence = node.scheduler.add_sequence(make_work(1, PROMPT), node.root, pool_prefix=found)
    found.release()
    node.scheduler.schedule_step()
    assert [node.pool.is_own_block(block) for block in sequence.block_table[:4]] == [
        True,
        True,
        False,
        False,
    ]
    assert sequence.pool_use.num_tokens == 2 * BLOCK


def test_unused_pool_pin_is_released_at_admission() -> None:
    node, pin = SteppedNode(), CountedPin()
    node.add_work(make_work(0, PROMPT, max_tokens=1))
    node.run()
    found = make_pool_prefix(pin, 4)
    sequence = node.scheduler.add_sequence(make_work(1, PROMPT), node.root, pool_prefix=found)
    found.release()
    assert pin.num_released == 0
    node.scheduler.schedule_step()
    assert sequence.state is SequenceState.PREFILLING
    assert pin.num_released == 1


def test_dedup_is_refused_while_a_step_is_in_flight() -> None:
    node = SteppedNode()
    sequence = node.add_work(make_work(0, PROMPT))
    node.scheduler.schedule_step()
    with pytest.raises(BlockLedgerError, match="between two steps"):
        node.scheduler.dedup_to_shared_pool(
            sequence.chain, POOL_BLOCKS, RefCountedPin(lambda: None)
        )


def test_deduped_blocks_are_free_and_not_found_again() -> None:
    node, pin = SteppedNode(), CountedPin()
    sequence = node.add_work(make_work(0, PROMPT, max_tokens=30))
    for _ in range(4):
        node.step()
    shared_pin = RefCountedPin(pin.release)
    free = node.pool.num_available_blocks
    assert node.scheduler.dedup_to_shared_pool(sequence.chain, POOL_BLOCKS, shared_pin) == 5
    shared_pin.release()
    assert sequence.block_table[:5] == list(POOL_BLOCKS)
    assert node.pool.num_available_blocks == free + 5
    assert not node.pool.find_own_suffix(sequence.chain, 5)
    node.pool.check_invariants()
    node.scheduler.cancel_sequence(sequence.key)
    assert pin.num_released == 1
    assert node.pool.num_available_blocks == node.pool.num_blocks
