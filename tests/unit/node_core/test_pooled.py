"""Block tables that name the shared pool's blocks, without a pool: the books are kept on own blocks only."""

import pytest

from baton.types import BlockIndex
from node_engine.core.block_pool import PartialHit
from node_engine.core.ledger import LedgerError
from node_engine.core.pooled import Pooled, PoolHold
from node_engine.core.sequence import SequenceState
from tests.unit.node_core.nodes import BLOCK, Node, work

PROMPT = tuple(range(1, 5 * BLOCK + 5))
FOREIGN = tuple(BlockIndex(1000 + number) for number in range(5))


class Pin:
    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


def pooled(pin: Pin, blocks: int, partial: int = 0) -> Pooled:
    beginning = PartialHit(FOREIGN[blocks], partial) if partial else None
    return Pooled(FOREIGN[:blocks], beginning, PoolHold(pin.release))


def test_a_pin_ends_with_its_last_user_and_once() -> None:
    pin = Pin()
    hold = PoolHold(pin.release)
    hold.take()
    hold.drop()
    assert (hold.users, pin.released) == (1, 0)
    hold.drop()
    assert pin.released == 1
    with pytest.raises(LedgerError):
        hold.drop()
    with pytest.raises(LedgerError):
        hold.take()


def test_pool_blocks_take_no_room_here() -> None:
    node, pin = Node(num_blocks=6), Pin()
    found = pooled(pin, 3, partial=7)
    sequence = node.scheduler.add(work(0, PROMPT), node.root, hand_off=True, pooled=found)
    found.done()
    node.scheduler.next_step()
    assert sequence.block_table[:3] == list(FOREIGN[:3])
    assert (sequence.num_borrowed, sequence.num_own, node.pool.available) == (3, 3, 3)
    assert (sequence.num_cached, sequence.num_pooled) == (3 * BLOCK + 7, 3 * BLOCK + 7)
    assert sequence.copy == (FOREIGN[3], sequence.block_table[3])
    assert pin.released == 0


def test_a_pin_is_held_until_the_step_in_flight_has_ended() -> None:
    node, pin = Node(), Pin()
    found = pooled(pin, 2)
    node.scheduler.add(work(0, PROMPT), node.root, pooled=found)
    found.done()
    plan = node.scheduler.next_step()
    assert plan.batch is not None
    node.scheduler.cancel(work(0, PROMPT).key)
    assert pin.released == 0
    node.scheduler.abandon(plan.batch)
    assert pin.released == 1
    node.pool.check()
    assert node.pool.available == node.pool.total


def test_own_blocks_go_first_and_the_pool_takes_over_behind_them() -> None:
    node, pin = Node(), Pin()
    node.add(work(0, PROMPT[: 2 * BLOCK + 1], max_tokens=1))
    node.run()
    found = pooled(pin, 4)
    sequence = node.scheduler.add(work(1, PROMPT), node.root, pooled=found)
    found.done()
    node.scheduler.next_step()
    assert [node.pool.owns(block) for block in sequence.block_table[:4]] == [True, True, False, False]
    assert sequence.num_pooled == 2 * BLOCK


def test_what_is_not_used_is_let_go_at_once() -> None:
    node, pin = Node(), Pin()
    node.add(work(0, PROMPT, max_tokens=1))
    node.run()
    found = pooled(pin, 4)
    sequence = node.scheduler.add(work(1, PROMPT), node.root, pooled=found)
    found.done()
    assert pin.released == 0
    node.scheduler.next_step()
    assert sequence.state is SequenceState.PREFILLING
    assert pin.released == 1


def test_tables_change_between_two_steps_only() -> None:
    node = Node()
    sequence = node.add(work(0, PROMPT))
    node.scheduler.next_step()
    with pytest.raises(LedgerError, match="between two steps"):
        node.scheduler.repoint(sequence.chain, FOREIGN, PoolHold(lambda: None))


def test_a_repointed_copy_is_free_and_not_found_again() -> None:
    node, pin = Node(), Pin()
    sequence = node.add(work(0, PROMPT, max_tokens=30))
    for _ in range(4):
        node.step()
    hold = PoolHold(pin.release)
    free = node.pool.available
    assert node.scheduler.repoint(sequence.chain, FOREIGN, hold) == 5
    hold.drop()
    assert sequence.block_table[:5] == list(FOREIGN)
    assert node.pool.available == free + 5
    assert not node.pool.own_run(sequence.chain, 5)
    node.pool.check()
    node.scheduler.cancel(sequence.key)
    assert pin.released == 1
    assert node.pool.available == node.pool.total
