"""What the scheduler decides, on cases small enough to say what it must be."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.errors import ConfigError, ContextLengthExceeded
from baton.kv.blocks import BlockHash
from baton.types import FinishReason
from node_engine.core.blocks.block_pool import BlockPool
from node_engine.core.blocks.block_records import BlockLedgerError, BlockState
from node_engine.core.scheduling.capacity import SchedulerLimits
from node_engine.core.scheduling.scheduler import Scheduler
from node_engine.core.sequences.outcomes import TokenEmitted
from node_engine.core.sequences.sequence import SequenceState
from node_engine.core.step.step_batch import SliceResult
from tests.unit.node_engine.core.stepped_node import (
    BLOCK,
    PROMPT,
    TICKET_ID,
    SteppedNode,
    batch_shape,
    expected_tokens,
    make_work,
    unshared_prompt,
)

# the shape of steps


def test_chunks_end_on_block_boundaries() -> None:
    node = SteppedNode(max_batched_tokens=40, max_num_seqs=2)
    node.add_work(make_work("a", PROMPT[:100], 3))
    assert [batch_shape(node.step()) for _ in range(5)] == [
        [(0, 32, False)],
        [(32, 32, False)],
        [(64, 36, True)],
        [(100, 1, True)],
        [(101, 1, True)],
    ]
    assert node.step() is None


def test_running_sequences_go_first_and_prompts_share_the_rest() -> None:
    node = SteppedNode(max_batched_tokens=64)
    node.add_work(make_work("a", unshared_prompt(5, 1), 9))
    node.step()
    node.add_work(make_work("b", unshared_prompt(20, 2)))
    node.add_work(make_work("c", unshared_prompt(20, 3)))
    node.add_work(make_work("d", unshared_prompt(90, 4)))
    assert batch_shape(node.step()) == [(5, 1, True), (0, 20, True), (0, 20, True), (0, 16, False)]


def test_a_prompt_that_gets_no_whole_block_waits_for_the_next_step() -> None:
    node = SteppedNode(max_batched_tokens=32, max_num_seqs=4)
    node.add_work(make_work("a", unshared_prompt(30, 1)))
    node.add_work(make_work("b", unshared_prompt(30, 2)))
    assert batch_shape(node.step()) == [(0, 30, True)]
    assert batch_shape(node.step()) == [(30, 1, True), (0, 30, True)]


def test_no_more_sequences_than_allowed() -> None:
    node = SteppedNode(max_num_seqs=2, max_batched_tokens=64)
    works = [make_work(name, unshared_prompt(4, name), 3) for name in range(5)]
    for work in works:
        node.add_work(work)
    assert node.scheduler.capacity.get_load().num_sequences_by_state[SequenceState.WAITING] == 5
    assert node.scheduler.capacity.get_load().queued_tokens == 20
    assert len(node.step().slices) == 2  # type: ignore[union-attr]
    node.run()
    assert all(node.emitted_tokens(work) == expected_tokens(work) for work in works)


def test_limits_that_could_starve_a_prompt_are_refused() -> None:
    pool = BlockPool(8, BLOCK, lambda: 0.0)
    with pytest.raises(ConfigError, match="needs 23"):
        Scheduler(pool, SchedulerLimits(8, 22, 100))
    Scheduler(pool, SchedulerLimits(8, 23, 100))


def test_emitted_tokens_are_context_and_count() -> None:
    node = SteppedNode()
    whole = make_work("whole", PROMPT[:20], 6)
    resumed = make_work("resumed", PROMPT[:20], 6, emitted=expected_tokens(whole)[:4])
    node.add_work(resumed)
    assert batch_shape(node.step()) == [(0, 24, True)]
    node.run()
    assert node.emitted_tokens(resumed) == expected_tokens(whole)[4:]
    events = [each.event for each in node.outcomes if isinstance(each, TokenEmitted)]
    assert [(event.output_index, event.finish_reason) for event in events] == [
        (4, None),
        (5, FinishReason.LENGTH),
    ]
    assert [
        slice_.sample_spec.position
        for batch in node.batches
        for slice_ in batch.slices
        if slice_.sample_spec
    ] == [24, 25]


def test_min_tokens_forbids_eos_and_stop_ids() -> None:
    node = SteppedNode()
    node.add_work(make_work("a", PROMPT[:4], 4, min_tokens=2, stop=[9]))
    node.run()
    forbidden = [
        slice_.sample_spec.forbidden_token_ids
        for batch in node.batches
        for slice_ in batch.slices
        if slice_.sample_spec
    ]
    assert forbidden == [(0, 9), (0, 9), (), ()]


def test_a_stop_token_is_emitted_and_ends_the_output() -> None:
    work = make_work("a", PROMPT[:4], 8)
    tokens = expected_tokens(work)
    node = SteppedNode()
    node.add_work(make_work("a", PROMPT[:4], 8, stop=[tokens[2]]))
    node.run()
    assert node.emitted_tokens(work) == tokens[:3]
    assert [each.event.finish_reason for each in node.outcomes if isinstance(each, TokenEmitted)][
        -1
    ] is FinishReason.STOP


def test_the_model_length_ends_the_output() -> None:
    node = SteppedNode(max_model_len=20)
    work = make_work("a", PROMPT[:15], 100)
    node.add_work(work)
    node.run()
    assert node.emitted_tokens(work) == expected_tokens(work)[:5]
    with pytest.raises(ContextLengthExceeded, match="has 20 tokens, max_model_len is 20"):
        node.add_work(make_work("b", PROMPT[:20]))


def test_one_live_sequence_per_key() -> None:
    node = SteppedNode()
    node.add_work(make_work("a", PROMPT[:4]))
    with pytest.raises(BlockLedgerError, match="exists already"):
        node.add_work(make_work("a", PROMPT[:4]))
    with pytest.raises(BlockLedgerError, match="0 tokens"):
        node.add_work(make_work("b", []))
    with pytest.raises(BlockLedgerError, match="exists already"):
        node.scheduler.reserve_for_handoff(make_work("a", PROMPT[:4]), node.root, TICKET_ID)
    assert node.pool.ownership.count_blocks(BlockState.RESERVED) == 0


# prefix reuse


CACHED_LENGTHS: dict[str, Callable[[int], int]] = {
    "nothing": lambda length: 0,
    "one block": lambda length: BLOCK,
    "half": lambda length: length // 2,
    "all but one": lambda length: length - 1,
    "all": lambda length: length,
}
REUSE = [
    (length, held)
    for length in (1, 15, 16, 17, 31, 32, 33)
    for held in CACHED_LENGTHS
    if CACHED_LENGTHS[held](length) <= length
]


@pytest.mark.parametrize(("length", "held"), REUSE)
def test_cached_prefixes_and_copy_on_write(length: int, held: str) -> None:
    """Whatever was computed before, the tokens are the same and only what is missing is
    computed."""
    shared = CACHED_LENGTHS[held](length)
    node = SteppedNode()
    # The warming prompt goes on differently after `shared` tokens and is long enough to fill its
    # blocks.
    node.add_work(make_work("warm", [*PROMPT[:shared], 999, *unshared_prompt(2 * BLOCK, 5)], 1))
    node.run()
    node.batches.clear()
    work = make_work("a", PROMPT[:length], 20)
    sequence = node.add_work(work)
    node.run()
    assert node.emitted_tokens(work) == expected_tokens(work)
    assert sequence.num_cached_tokens == min(shared, length - 1)
    first = node.batches[0]
    assert [(slice_.start, len(slice_.token_ids)) for slice_ in first.slices] == [
        (sequence.num_cached_tokens, length - sequence.num_cached_tokens)
    ]
    assert len(first.block_copies) == (1 if sequence.num_cached_tokens % BLOCK else 0), (
        "a shared block is never written"
    )
    assert node.pool.ownership.count_blocks(BlockState.IN_USE) == 0


def test_the_source_of_a_copy_is_held_until_the_copy_is_made() -> None:
    node = SteppedNode(num_blocks=4)
    node.add_work(make_work("warm", PROMPT[:16], 1))
    node.run()
    node.add_work(make_work("a", PROMPT[:10], 1))
    plan = node.scheduler.schedule_step()
    assert plan.batch is not None
    [(source, _)] = plan.batch.block_copies
    assert node.pool.ownership.get_block_state(source) is BlockState.IN_USE
    node.scheduler.update_from_results(plan.batch, node.engine.run(plan.batch))
    assert node.pool.ownership.get_block_state(source) is BlockState.CACHED
    node.pool.check_invariants()


def test_the_source_of_a_copy_never_stands_in_the_way() -> None:
    """Two blocks, both cached. The prompt needs both; a reference on the second, to copy from it,
    would be a third."""
    node = SteppedNode(num_blocks=2)
    node.add_work(make_work("warm", PROMPT[:32], 1))
    node.run()
    work = make_work("a", PROMPT[:30], 1)
    sequence = node.add_work(work)
    node.run()
    assert node.emitted_tokens(work) == expected_tokens(work)
    assert sequence.num_cached_tokens == 16


def test_output_blocks_are_reused_by_the_next_turn() -> None:
    node = SteppedNode()
    work = make_work("a", PROMPT[:10], 40)
    node.add_work(work)
    node.run()
    turn = make_work("b", [*PROMPT[:10], *expected_tokens(work)], 4)
    sequence = node.add_work(turn)
    node.run()
    assert node.emitted_tokens(turn) == expected_tokens(turn)
    assert sequence.num_cached_tokens == 48, (
        "50 tokens; of the last one's block nothing was computed yet"
    )


def test_cache_salt_isolates_tenants() -> None:
    node = SteppedNode()
    node.add_work(make_work("warm", PROMPT[:64], 1))
    node.run()
    other_root = BlockHash(node.root[::-1])
    sequence = node.scheduler.add_sequence(make_work("a", PROMPT[:64], 1), other_root)
    node.run()
    assert sequence.num_cached_tokens == 0


# engines that run ahead


def test_deferred_slices_belong_to_the_next_step_again() -> None:
    node, rng = SteppedNode(max_num_seqs=4), random.Random(0)
    works = [make_work(name, unshared_prompt(40 + name, name), 20) for name in range(6)]
    sequences = [node.add_work(work) for work in works]
    while (plan := node.scheduler.schedule_step()).batch is not None:
        kept = [number == 0 or rng.random() < 0.6 for number in range(len(plan.batch.slices))]
        computed = replace(
            plan.batch,
            slices=tuple(s for s, keep in zip(plan.batch.slices, kept, strict=True) if keep),
        )
        results = iter(node.engine.run(computed))
        deferred = SliceResult(is_deferred=True)
        everything = [next(results) if keep else deferred for keep in kept]
        assert plan.batch.without_deferred(everything) == computed
        node.outcomes += node.scheduler.update_from_results(plan.batch, everything)
        node.pool.check_invariants()
    for work, sequence in zip(works, sequences, strict=True):
        assert sequence.output_token_ids == tuple(expected_tokens(work))


def test_copy_on_write_of_a_deferred_slice_is_made_once() -> None:
    """The slice may be computed ahead, behind the copy: a second copy would overwrite it."""
    node = SteppedNode()
    node.add_work(make_work("warm", PROMPT[:40], 1))
    node.run()
    work = make_work("a", PROMPT[:50], 4)
    node.add_work(work)
    batch = node.scheduler.schedule_step().batch
    assert batch is not None
    assert len(batch.block_copies) == 1
    computed_ahead = node.engine.run(batch)
    node.scheduler.update_from_results(batch, [SliceResult(is_deferred=True)])
    node.pool.check_invariants()
    again = node.scheduler.schedule_step().batch
    assert again is not None
    assert again.slices == batch.slices
    assert again.block_copies == ()
    node.outcomes += node.scheduler.update_from_results(again, computed_ahead)
    node.run()
    assert node.emitted_tokens(work) == expected_tokens(work)


def test_lookahead_takes_no_block_that_a_sequence_needs() -> None:
    node = SteppedNode(num_blocks=5)
    node.scheduler.capacity.limits = replace(node.scheduler.limits, lookahead_tokens=1)
    works = [
        make_work("a", PROMPT[: 2 * BLOCK - 3], 4),
        make_work("b", unshared_prompt(BLOCK, 1), 8),
    ]
    for work in works:
        node.add_work(work)
    node.run()
    for work in works:
        assert node.emitted_tokens(work) == expected_tokens(work)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "is_prefill_only", "num_blocks"),
    [
        (BLOCK, 2, False, [2, 2]),
        (BLOCK, 1, False, [1]),
        (BLOCK, 2, True, [1]),
        (BLOCK - 1, 3, False, [1, 2, 2]),
        (BLOCK - 1, 2, False, [1, 1]),
        (2 * BLOCK, 2, False, [2, 3, 3]),  # in two chunks
    ],
)
def test_lookahead_takes_a_block_only_if_another_token_follows_here(
    num_prompt_tokens: int, max_tokens: int, is_prefill_only: bool, num_blocks: list[int]
) -> None:
    """A sequence takes a lookahead block only if this node will compute another token of it."""
    node = SteppedNode(max_batched_tokens=BLOCK, max_num_seqs=1)
    node.scheduler.capacity.limits = replace(node.scheduler.limits, lookahead_tokens=1)
    work = make_work("a", PROMPT[:num_prompt_tokens], max_tokens)
    node.add_work(work, is_prefill_only=is_prefill_only)
    held = []
    while (batch := node.step()) is not None:
        held.append(len(batch.slices[0].block_table))
    assert held == num_blocks


def test_running_sequences_get_blocks_for_the_lookahead_of_the_engine() -> None:
    node = SteppedNode(num_blocks=4)
    node.scheduler.capacity.limits = replace(node.scheduler.limits, lookahead_tokens=1)
    node.add_work(make_work("a", PROMPT[: BLOCK - 2], 40))
    rooms = []
    for _ in range(20):
        batch = node.step()
        assert batch is not None
        (slice_,) = batch.slices
        rooms.append(len(slice_.block_table) * BLOCK - slice_.start - len(slice_.token_ids))
    assert min(rooms[1:]) >= 1
    node.add_work(make_work("b", unshared_prompt(BLOCK, 1), 4))  # the rest of the blocks
    node.run()
    node.pool.check_invariants()
