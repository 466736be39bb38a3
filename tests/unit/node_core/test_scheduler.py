"""What the scheduler decides, on cases small enough to say what it must be."""

from collections.abc import Callable

import pytest

from baton.errors import ConfigError, TooLong
from baton.types import FinishReason
from node_engine.core.block_pool import BlockPool
from node_engine.core.ledger import BlockState, LedgerError
from node_engine.core.outcome import Emitted
from node_engine.core.scheduler import Scheduler, SchedulerLimits
from node_engine.core.sequence import SequenceState
from tests.unit.node_core.nodes import BLOCK, PROMPT, Node, T, expected, other, shape, work

# the shape of steps


def test_chunks_end_on_block_boundaries() -> None:
    node = Node(max_batched_tokens=40, max_num_seqs=2)
    node.add(work("a", PROMPT[:100], 3))
    assert [shape(node.step()) for _ in range(5)] == [
        [(0, 32, False)],
        [(32, 32, False)],
        [(64, 36, True)],
        [(100, 1, True)],
        [(101, 1, True)],
    ]
    assert node.step() is None


def test_running_sequences_go_first_and_prompts_share_the_rest() -> None:
    node = Node(max_batched_tokens=64)
    node.add(work("a", other(5, 1), 9))
    node.step()
    node.add(work("b", other(20, 2)))
    node.add(work("c", other(20, 3)))
    node.add(work("d", other(90, 4)))
    assert shape(node.step()) == [(5, 1, True), (0, 20, True), (0, 20, True), (0, 16, False)]


def test_a_prompt_that_gets_no_whole_block_waits_for_the_next_step() -> None:
    node = Node(max_batched_tokens=32, max_num_seqs=4)
    node.add(work("a", other(30, 1)))
    node.add(work("b", other(30, 2)))
    assert shape(node.step()) == [(0, 30, True)]
    assert shape(node.step()) == [(30, 1, True), (0, 30, True)]


def test_no_more_sequences_than_allowed() -> None:
    node = Node(max_num_seqs=2, max_batched_tokens=64)
    jobs = [work(name, other(4, name), 3) for name in range(5)]
    for job in jobs:
        node.add(job)
    assert node.scheduler.load().sequences[SequenceState.WAITING] == 5
    assert node.scheduler.load().queued_tokens == 20
    assert len(node.step().slices) == 2  # type: ignore[union-attr]
    node.run()
    assert all(node.emitted(job) == expected(job) for job in jobs)


def test_limits_that_could_starve_a_prompt_are_refused() -> None:
    pool = BlockPool(8, BLOCK, lambda: 0.0)
    with pytest.raises(ConfigError, match="needs 23"):
        Scheduler(pool, SchedulerLimits(8, 22, 100))
    Scheduler(pool, SchedulerLimits(8, 23, 100))


def test_emitted_tokens_are_context_and_count() -> None:
    node = Node()
    whole = work("whole", PROMPT[:20], 6)
    resumed = work("resumed", PROMPT[:20], 6, emitted=expected(whole)[:4])
    node.add(resumed)
    assert shape(node.step()) == [(0, 24, True)]
    node.run()
    assert node.emitted(resumed) == expected(whole)[4:]
    events = [each.event for each in node.outcomes if isinstance(each, Emitted)]
    assert [(event.index, event.finish) for event in events] == [(4, None), (5, FinishReason.LENGTH)]
    assert [piece.sample.position for batch in node.batches for piece in batch.slices if piece.sample] == [24, 25]


def test_min_tokens_forbids_eos_and_stop_ids() -> None:
    node = Node()
    node.add(work("a", PROMPT[:4], 4, min_tokens=2, stop=[9]))
    node.run()
    forbidden = [piece.sample.forbidden for batch in node.batches for piece in batch.slices if piece.sample]
    assert forbidden == [(0, 9), (0, 9), (), ()]


def test_a_stop_token_is_emitted_and_ends_the_output() -> None:
    job = work("a", PROMPT[:4], 8)
    tokens = expected(job)
    node = Node()
    node.add(work("a", PROMPT[:4], 8, stop=[tokens[2]]))
    node.run()
    assert node.emitted(job) == tokens[:3]
    assert [each.event.finish for each in node.outcomes if isinstance(each, Emitted)][-1] is FinishReason.STOP


def test_the_model_length_ends_the_output() -> None:
    node = Node(max_model_len=20)
    job = work("a", PROMPT[:15], 100)
    node.add(job)
    node.run()
    assert node.emitted(job) == expected(job)[:5]
    with pytest.raises(TooLong, match="has 20 tokens, max_model_len is 20"):
        node.add(work("b", PROMPT[:20]))


def test_one_live_sequence_per_key() -> None:
    node = Node()
    node.add(work("a", PROMPT[:4]))
    with pytest.raises(LedgerError, match="here already"):
        node.add(work("a", PROMPT[:4]))
    with pytest.raises(LedgerError, match="0 tokens"):
        node.add(work("b", []))
    with pytest.raises(LedgerError, match="here already"):
        node.scheduler.expect(work("a", PROMPT[:4]), node.root, T)
    assert node.pool.count(BlockState.RESERVED) == 0


# prefix reuse


HELD: dict[str, Callable[[int], int]] = {
    "nothing": lambda length: 0,
    "one block": lambda length: BLOCK,
    "half": lambda length: length // 2,
    "all but one": lambda length: length - 1,
    "all": lambda length: length,
}
REUSE = [(length, held) for length in (1, 15, 16, 17, 31, 32, 33) for held in HELD if HELD[held](length) <= length]


@pytest.mark.parametrize(("length", "held"), REUSE)
def test_cached_prefixes_and_copy_on_write(length: int, held: str) -> None:
    """Whatever was computed before, the tokens are the same and only what is missing is computed."""
    shared = HELD[held](length)
    node = Node()
    # The warming prompt goes on differently after `shared` tokens and is long enough to fill its blocks.
    node.add(work("warm", [*PROMPT[:shared], 999, *other(2 * BLOCK, 5)], 1))
    node.run()
    node.batches.clear()
    job = work("a", PROMPT[:length], 20)
    sequence = node.add(job)
    node.run()
    assert node.emitted(job) == expected(job)
    assert sequence.num_cached == min(shared, length - 1)
    first = node.batches[0]
    assert [(piece.start, len(piece.tokens)) for piece in first.slices] == [
        (sequence.num_cached, length - sequence.num_cached)
    ]
    assert len(first.copies) == (1 if sequence.num_cached % BLOCK else 0), "a shared block is never written"
    assert node.pool.count(BlockState.IN_USE) == 0


def test_the_source_of_a_copy_is_held_until_the_copy_is_made() -> None:
    node = Node(num_blocks=4)
    node.add(work("warm", PROMPT[:16], 1))
    node.run()
    node.add(work("a", PROMPT[:10], 1))
    plan = node.scheduler.next_step()
    assert plan.batch is not None
    [(source, _)] = plan.batch.copies
    assert node.pool.state(source) is BlockState.IN_USE
    node.scheduler.update(plan.batch, node.engine.run(plan.batch))
    assert node.pool.state(source) is BlockState.CACHED
    node.pool.check()


def test_the_source_of_a_copy_never_stands_in_the_way() -> None:
    """Two blocks, both cached. The prompt needs both; a reference on the second, to copy from it, would be a third."""
    node = Node(num_blocks=2)
    node.add(work("warm", PROMPT[:32], 1))
    node.run()
    job = work("a", PROMPT[:30], 1)
    sequence = node.add(job)
    node.run()
    assert node.emitted(job) == expected(job)
    assert sequence.num_cached == 16


def test_generated_blocks_are_found_by_the_next_turn() -> None:
    node = Node()
    job = work("a", PROMPT[:10], 40)
    node.add(job)
    node.run()
    turn = work("b", [*PROMPT[:10], *expected(job)], 4)
    sequence = node.add(turn)
    node.run()
    assert node.emitted(turn) == expected(turn)
    assert sequence.num_cached == 48, "50 tokens; of the last one's block nothing was computed yet"


def test_other_tenants_find_nothing() -> None:
    node = Node()
    node.add(work("warm", PROMPT[:64], 1))
    node.run()
    sequence = node.scheduler.add(work("a", PROMPT[:64], 1), node.root[::-1])  # type: ignore[arg-type]
    node.run()
    assert sequence.num_cached == 0
