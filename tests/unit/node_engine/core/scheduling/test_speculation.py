"""Speculative decoding in the scheduler: the same tokens in fewer steps, and no block lost.

The paced engine computes each token from the KV that it reads, so that a rejected draft that stayed
in the cache would change what follows. Its vocabulary is small here, so that drafts are right now
and then.
"""

import random
from typing import Any

import pytest

from node_engine.core.metrics.decode_step_totals import DecodeStepTotals
from node_engine.core.metrics.step_costs import count_context_tokens
from node_engine.core.scheduling.speculator import PROBE_INTERVAL_STEPS
from node_engine.core.sequences.outcomes import DraftsVerified, SequenceFailed
from node_engine.core.step.step_batch import SliceResult
from tests.paced_reference import paced_reference_tokens
from tests.unit.node_engine.core.stepped_node import BLOCK, SteppedNode, make_work

FEW = 3  # tokens of the vocabulary
PROMPT = [1, 2, 1, 2, 0, 1, 2, 1] * 3


def make_node(num_blocks: int = 64, max_draft_tokens: int = 5, **limits: Any) -> SteppedNode:
    return SteppedNode(num_blocks, vocab_size=FEW, max_draft_tokens=max_draft_tokens, **limits)


def count_drafts(node: SteppedNode) -> int:
    return sum(batch.num_draft_tokens for batch in node.batches)


def draft_counter(node: SteppedNode, result: str) -> float:
    return node.scheduler.speculator.counters()[f'baton_draft_tokens_total{{result="{result}"}}']


def test_the_same_tokens_come_in_fewer_steps() -> None:
    node, plain = make_node(), make_node(max_draft_tokens=0)
    work = make_work("a", PROMPT, 100)
    for each in (node, plain):
        each.add_work(work)
        each.run()
        assert each.emitted_tokens(work) == paced_reference_tokens(PROMPT, 100, FEW)
    assert len(plain.batches) == 100
    accepted = draft_counter(node, "accepted")
    assert len(node.batches) == 100 - accepted
    assert accepted > 10
    assert count_drafts(node) == accepted + draft_counter(node, "rejected") + draft_counter(
        node, "unused"
    )
    verified = [each.result for each in node.outcomes if isinstance(each, DraftsVerified)]
    assert sum(result.num_accepted for result in verified) == accepted
    assert node.scheduler.speculator.counters()["baton_drafts_total"] == len(verified)
    assert plain.scheduler.speculator.counters() == {}


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 17])
def test_a_draft_never_exceeds_what_the_sequence_may_still_have(max_tokens: int) -> None:
    node = make_node()
    work = make_work("a", PROMPT, max_tokens)
    node.add_work(work)
    node.run()
    assert node.emitted_tokens(work) == paced_reference_tokens(PROMPT, max_tokens, FEW)
    shortest = make_node(max_model_len=len(PROMPT) + 7)
    shortest.add_work(make_work("a", PROMPT, 50))
    shortest.run()
    assert len(shortest.emitted_tokens(work)) == 7
    assert all(
        slice_.start + len(slice_.token_ids) < len(PROMPT) + 7
        for batch in shortest.batches
        for slice_ in batch.slices
    )


def test_a_stop_token_ends_the_output_in_the_middle_of_a_draft() -> None:
    whole = paced_reference_tokens(PROMPT, 80, FEW)
    for stop in range(1, FEW):
        node = make_node()
        work = make_work("a", PROMPT, 80, stop=[stop], min_tokens=40, ignore_eos=True)
        node.add_work(work)
        node.run()
        plain = make_node(max_draft_tokens=0)
        plain.add_work(work)
        plain.run()
        assert node.emitted_tokens(work) == plain.emitted_tokens(work)
        assert len(node.emitted_tokens(work)) < len(whole)


@pytest.mark.parametrize("seed", range(12))
def test_a_tiny_cache_changes_neither_tokens_nor_the_ledger(seed: int) -> None:
    dice = random.Random(seed)
    node = make_node(num_blocks=9, max_num_seqs=4, max_draft_tokens=dice.choice((3, 9, 20)))
    works = [
        make_work(
            number, [dice.randrange(FEW) for _ in range(dice.randint(1, 40))], dice.randint(1, 60)
        )
        for number in range(6)
    ]
    pending = list(works)
    while pending or len(node.scheduler.sequences):
        if pending and dice.random() < 0.3:
            node.add_work(pending.pop())
        node.step()
        for sequence in node.scheduler.sequences:
            needed = -(-(sequence.num_computed_tokens + 1) // BLOCK)
            if sequence.state.value == "running":
                assert len(sequence.block_table) == needed or (
                    len(sequence.block_table) == needed - 1
                ), "blocks of rejected drafts are released after the step"
    failed = {each.sequence.key: each for each in node.outcomes if isinstance(each, SequenceFailed)}
    for work in works:
        expected = paced_reference_tokens(
            work.context_token_ids, work.request.sampling.max_tokens, FEW
        )
        tokens = node.emitted_tokens(work)
        if work.key in failed:
            assert failed[work.key].error.code == "preempted"
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected
    assert node.pool.num_available_blocks == 9


def test_what_others_find_in_the_cache_has_accepted_tokens_only() -> None:
    node = make_node()
    first = make_work("a", PROMPT, 70)
    node.add_work(first)
    node.run()
    assert draft_counter(node, "rejected") > 5
    context = [*PROMPT, *node.emitted_tokens(first)]
    again = make_work("b", context, 30)
    sequence = node.add_work(again)
    node.run()
    assert sequence.num_cached_tokens >= len(context) - BLOCK
    assert node.emitted_tokens(again) == paced_reference_tokens(context, 30, FEW)


def test_a_step_with_prompts_verifies_no_drafts() -> None:
    node = make_node(max_batched_tokens=32)
    first = make_work("a", PROMPT, 60)
    node.add_work(first)
    for _ in range(8):
        node.step()
    assert count_drafts(node)
    before = len(node.batches)
    second = make_work("b", [2, 1, 0] * 60, 20)
    node.add_work(second)
    node.run()
    beside_prompts = [
        batch
        for batch in node.batches[before:]
        if any(slice_.start < 180 and len(slice_.token_ids) > 6 for slice_ in batch.slices)
    ]
    assert len(beside_prompts) > 2
    assert all(batch.num_draft_tokens == 0 for batch in beside_prompts)
    for work in (first, second):
        expected = paced_reference_tokens(
            work.context_token_ids, work.request.sampling.max_tokens, FEW
        )
        assert node.emitted_tokens(work) == expected


def test_drafts_take_no_block_that_others_need() -> None:
    """With all blocks in use, a draft ends with the block that the sequence has."""
    node = make_node(num_blocks=2, max_num_seqs=1, max_draft_tokens=20)
    work = make_work("a", [1, 2] * 8, 15, ignore_eos=True)
    node.add_work(work)
    node.run()
    assert node.emitted_tokens(work) == paced_reference_tokens([1, 2] * 8, 15, FEW)
    assert all(
        slice_.start + len(slice_.token_ids) <= 2 * BLOCK
        for batch in node.batches
        for slice_ in batch.slices
    )


def test_a_sequence_that_is_cancelled_during_a_step_releases_its_blocks() -> None:
    node = make_node()
    work = make_work("a", PROMPT, 100)
    node.add_work(work)
    while not count_drafts(node):
        node.step()
    batch = node.scheduler.schedule_step().batch
    assert batch is not None
    results = node.engine.run(batch)
    node.scheduler.cancel_sequence(work.key)
    assert node.scheduler.update_from_results(batch, results) == []
    node.pool.check_invariants()
    assert node.pool.num_available_blocks == 64


def test_dear_drafts_are_given_up_and_tried_again_now_and_then() -> None:
    """A loop, whose drafts are always right, on a machine where a draft costs two steps."""
    node = make_node(num_blocks=256, max_draft_tokens=2)
    node.add_work(make_work("a", [1, 2, 1, 2, 1, 2], 3000, ignore_eos=True))
    with_drafts: list[bool] = []
    token = 1

    def run_step(seconds_of_draft: float) -> None:
        nonlocal token
        batch = node.scheduler.schedule_step().batch
        assert batch is not None
        slice_ = batch.slices[0]
        drawn = []
        for _ in range(1 + len(slice_.draft_specs)):
            drawn.append(SliceResult(token))
            token = 3 - token
        result = drawn[0]._replace(after_drafts=tuple(drawn[1:]))
        seconds = 0.01 + seconds_of_draft * batch.num_draft_tokens
        node.scheduler.prefill_budget.observe_step(batch, seconds)
        node.scheduler.speculator.observe_step(batch, seconds)
        node.scheduler.update_from_results(batch, [result])
        with_drafts.append(batch.num_draft_tokens > 0)

    for _ in range(3 * PROBE_INTERVAL_STEPS):
        run_step(0.02)
    tried = [number for number, has in enumerate(with_drafts) if has]
    assert len([number for number in tried if number < PROBE_INTERVAL_STEPS]) <= 8
    assert len([number for number in tried if number >= PROBE_INTERVAL_STEPS]) in (1, 2, 3)
    with_drafts.clear()
    for _ in range(2 * PROBE_INTERVAL_STEPS):
        run_step(0.0005)
    assert sum(with_drafts[-20:]) == 20, "cheap again, as the next try has shown"


def test_decode_step_totals_count_the_seconds_of_a_token() -> None:
    node = make_node()
    node.add_work(make_work("a", PROMPT, 100))
    while not count_drafts(node):
        node.step()
    batch = node.batches[-1]
    totals = DecodeStepTotals().with_step(batch, 0.3, num_accepted_drafts=2)
    assert totals.num_steps == totals.num_sequences == 1
    assert totals.seconds == pytest.approx(0.1)
    assert DecodeStepTotals().with_step(batch, 0.3).seconds == 0.3
    attended, read = count_context_tokens(batch.slices, None)
    length = len(batch.slices[0].token_ids)
    assert attended > read
    assert read == batch.slices[0].start + length


def test_a_step_that_fails_leaves_no_draft_behind() -> None:
    node = make_node()
    work = make_work("a", PROMPT, 60)
    node.add_work(work)
    while not count_drafts(node):
        node.step()
    plan = node.scheduler.schedule_step()
    assert plan.batch is not None
    node.scheduler.abandon_step(plan.batch)
    node.run()
    assert node.emitted_tokens(work) == paced_reference_tokens(PROMPT, 60, FEW)


def test_drafts_fit_into_the_step() -> None:
    node = make_node(max_num_seqs=4, max_batched_tokens=19, max_draft_tokens=20)
    works = [make_work(number, PROMPT[number:], 50) for number in range(4)]
    for work in works:
        node.add_work(work)
    node.run()
    batches = [batch for batch in node.batches if batch.num_draft_tokens]
    assert batches
    assert max(batch.num_tokens for batch in batches) <= 19
    for work in works:
        tokens = paced_reference_tokens(work.context_token_ids, 50, FEW)
        assert node.emitted_tokens(work) == tokens
