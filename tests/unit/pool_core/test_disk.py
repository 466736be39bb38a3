"""What goes to disk, in which order, and what comes back."""

import pytest

from kv_pool.core.disk import Move
from kv_pool.core.eviction import Lru
from kv_pool.core.holders import Holder
from kv_pool.core.load_worth import UNKNOWN, LoadWorth
from kv_pool.core.pool import Pool
from kv_pool.core.tier import Tier
from tests.unit.pool_core.prompts import SIZE, fill, of_blocks

NODE = Holder("node")


def pool_of(memory: int, disk: int) -> Pool:
    pool = Pool(Tier(memory, SIZE, Lru(memory)), Tier(disk, SIZE, Lru(disk)))
    pool.attach(NODE, 0.0)
    return pool


def test_what_was_used_goes_to_disk_with_all_before_it() -> None:
    pool = pool_of(4, 8)
    path = fill(pool.memory, of_blocks(1, 2, 3))
    pool.memory.match(of_blocks(1, 2), 1.0)
    unused = fill(pool.memory, of_blocks(9), 2.0)
    assert pool.reserve(NODE, of_blocks(7, 8), 0, 3.0).blocks == (path[2], path[1])
    moves = pool.take_moves()
    assert moves == (Move(path[0], 0), Move(path[1], 1)), "the third was never found, and is gone"
    assert pool.take_moves() == ()
    assert unused[0] in pool.memory.index
    assert pool.disk is not None
    assert list(pool.disk.match(of_blocks(1, 2, 3), 4.0)) == [0, 1]
    found = pool.find(NODE, of_blocks(1, 2, 3), 100, 5.0)
    assert list(found.blocks) == [path[0]]
    assert list(pool.on_disk(of_blocks(1, 2, 3), len(found.blocks), 3, 5.0)) == [1]


def test_a_small_disk_takes_the_beginning() -> None:
    pool = pool_of(3, 2)
    fill(pool.memory, of_blocks(1, 2, 3))
    pool.memory.match(of_blocks(1, 2, 3), 1.0)
    pool.reserve(NODE, of_blocks(7), 0, 2.0)
    assert [move.disk for move in pool.take_moves()] == [0, 1]
    pool.memory.check()
    assert pool.disk is not None
    pool.disk.check()


def test_what_is_on_disk_comes_back_as_a_publication() -> None:
    pool, prompt = pool_of(3, 8), of_blocks(1, 2, 3)
    fill(pool.memory, prompt)
    pool.memory.match(prompt, 1.0)
    other = pool.reserve(NODE, of_blocks(7, 8), 0, 2.0)
    pool.take_moves()
    assert other.publication is not None
    pool.withdraw(NODE, other.publication)
    found = pool.find(NODE, prompt, 100, 3.0)
    more = pool.on_disk(prompt, len(found.blocks), len(prompt), 3.0)
    granted = pool.reserve(NODE, prompt, len(found.blocks), 3.0, end=len(found.blocks) + len(more))
    assert granted.publication is not None
    sealed = pool.seal(NODE, granted.publication, 1, 4.0)  # the second one's checksum was wrong
    assert len(sealed.blocks) == len(found.blocks) + 1
    pool.check()


def test_loading_pays_when_reading_is_faster_than_computing() -> None:
    worth = LoadWorth()
    worth.rate.measured(1 << 30, waited=0.001, took=1.0, now=0.0)
    assert worth.patience(0, 1024, 50_000_000, 1e-4, 1.0) == pytest.approx(0.1024, rel=0.01)
    assert worth.patience(0, 16, 50_000_000, 1e-4, 1.0) is None
    assert worth.patience(0, 1024, 120_000_000, 1e-4, 1.0) is None
    assert worth.patience(65536, 1024, 120_000_000, 1e-4, 1.0), "behind a long context a token costs half as much again"


def test_what_is_not_known_is_tried() -> None:
    worth = LoadWorth()
    assert worth.patience(0, 16, 1 << 30, None, 0.0) == UNKNOWN
    assert worth.patience(0, 16, 1 << 30, 1e-4, 0.0), "no disk has been measured"
    worth.rate.measured(1 << 20, waited=0.0, took=1.0, now=0.0)
    assert worth.patience(0, 16, 1 << 30, None, 0.0) is None, "as another node told"
    assert worth.patience(0, 16, 1 << 30, None, 61.0), "a slow moment is not for ever"


def test_what_may_move_is_bounded_and_begins_with_the_first() -> None:
    pool = pool_of(4, 8)
    assert pool.disk is not None
    pool.mount(pool.disk, lambda: 3)
    fill(pool.memory, of_blocks(1, 2, 3, 4))
    pool.memory.match(of_blocks(1, 2, 3, 4), 1.0)
    pool.reserve(NODE, of_blocks(7, 8), 0, 2.0)
    assert [move.disk for move in pool.take_moves()] == [0, 1, 2]
    assert pool.not_moved == 1
    assert list(pool.disk.match(of_blocks(1, 2, 3, 4), 3.0)) == [0, 1, 2]
    pool.mount(None, lambda: 3)
    pool.reserve(NODE, of_blocks(5, 6), 0, 4.0)
    assert pool.take_moves() == ()


def test_a_disk_without_room_is_tried_once_for_each_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A try costs as much as the prompt is long, and there may be thousands of victims."""
    pool = pool_of(8, 3)
    prompt = of_blocks(1, 2, 3, 4, 5, 6, 7, 8)
    fill(pool.memory, prompt)
    assert pool.disk is not None
    fill(pool.disk, prompt)
    pool.memory.match(prompt, 1.0)
    tried: list[int] = []
    chain = pool.memory.index.chain
    monkeypatch.setattr(pool.memory.index, "chain", lambda block: (tried.append(block), chain(block))[1])
    for number in (1, 2):
        granted = pool.reserve(NODE, of_blocks(*range(20, 24)), 0, 2.0)
        assert pool.take_moves() == ()
        assert len(tried) == number
        assert pool.not_moved == 4 * number
        assert granted.publication is not None
        pool.withdraw(NODE, granted.publication)
        fill(pool.memory, prompt, 3.0)
        pool.memory.match(prompt, 4.0)
    pool.disk.check()


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_what_the_disk_evicts_at_once_is_not_copied_over_what_follows_it(slots: int) -> None:
    """Else the journal would have, for a moment, one block's checksum under another one's name."""
    pool = pool_of(4, slots)
    for prompt in (of_blocks(1, 2), of_blocks(3, 4)):
        fill(pool.memory, prompt)
        pool.memory.match(prompt, 1.0)
    names = [pool.memory.index.name(block) for block in range(4)]
    pool.reserve(NODE, of_blocks(7, 8, 9, 10), 0, 2.0)
    moves = pool.take_moves()
    assert pool.disk is not None
    assert len({move.disk for move in moves}) == len(moves) == slots
    for move in moves:
        assert pool.disk.index.name(move.disk) == names[move.memory]
    pool.disk.check()


def test_a_branch_is_dropped_unless_somebody_pins_it() -> None:
    pool = pool_of(3, 8)
    assert pool.disk is not None
    disk = pool.disk
    fill(disk, of_blocks(1, 2, 3))
    fill(disk, of_blocks(1, 2, 4, 5))
    (second,) = disk.match(of_blocks(1, 2), 1.0)[1:]
    deepest = disk.match(of_blocks(1, 2, 4, 5), 1.0)[-1]
    disk.pin(deepest)
    disk.drop_branch(second)
    assert len(disk.index) == 5
    disk.unpin(deepest)
    disk.drop_branch(second)
    assert len(disk.index) == 1
    disk.drop_branch(second)
    disk.check()
