"""Speculative decoding with a draft model in the scheduler: its drafts, its cache and its cost.

The draft model computes each token from the KV that it reads, as the served one does: it is right
exactly if its cache has the tokens of the sequence, and wrong on purpose now and then.
"""

import random

import pytest

from node_engine.core.scheduling.speculator import MAX_PROBE_SHARE, PROBE_INTERVAL_STEPS
from node_engine.core.sequences.outcomes import SequenceFailed
from node_engine.core.speculation.model_drafter import MAX_CATCH_UP_SECONDS, MAX_CATCH_UP_TOKENS
from tests.paced_reference import paced_reference_tokens
from tests.unit.node_engine.core.paced_draft_model import PacedDraftModel
from tests.unit.node_engine.core.stepped_node import (
    PROMPT,
    VOCAB,
    SteppedNode,
    expected_tokens,
    make_work,
    unshared_prompt,
)


def make_node(model: PacedDraftModel, num_blocks: int = 64, **limits: int) -> SteppedNode:
    return SteppedNode(num_blocks, drafter=model.drafter, **{"max_draft_tokens": 4, **limits})


def draft_counter(node: SteppedNode, result: str) -> float:
    return node.scheduler.speculator.counters()[f'baton_draft_tokens_total{{result="{result}"}}']


def test_right_drafts_take_a_step_for_several_tokens() -> None:
    model = PacedDraftModel(VOCAB)
    node = make_node(model)
    work = make_work("a", PROMPT[:40], 101)
    node.add_work(work)
    node.run()
    assert node.emitted_tokens(work) == expected_tokens(work)
    assert draft_counter(node, "rejected") == 0
    assert len(node.batches) == 101 - draft_counter(node, "accepted") < 30
    model.assert_nothing_is_held()


@pytest.mark.parametrize("seed", range(8))
def test_after_wrong_drafts_the_cache_has_the_tokens_of_the_sequence(seed: int) -> None:
    """Otherwise the next drafts would be wrong, too: nothing else is wrong here."""
    model = PacedDraftModel(VOCAB, error_share=0.3, seed=seed)
    node = make_node(model, max_draft_tokens=6)
    works = [make_work(number, unshared_prompt(9 + 20 * number, number), 80) for number in range(3)]
    for work in works:
        node.add_work(work)
    node.run()
    for work in works:
        assert node.emitted_tokens(work) == expected_tokens(work)
    right, wrong = draft_counter(node, "accepted"), draft_counter(node, "rejected")
    assert 0.5 < right / (right + wrong) < 0.9, "each token is wrong with the share 0.3"
    model.assert_nothing_is_held()


def test_a_long_context_is_computed_over_several_steps() -> None:
    model = PacedDraftModel(VOCAB)
    node = make_node(model, max_batched_tokens=512)
    works = [make_work(number, unshared_prompt(400, number), 40) for number in range(2)]
    for work in works:
        node.add_work(work)
    node.run()
    assert max(batch.num_tokens for batch in model.batches) == MAX_CATCH_UP_TOKENS + len(works)
    assert draft_counter(node, "accepted") > 40
    for work in works:
        assert node.emitted_tokens(work) == expected_tokens(work)


def test_contexts_of_a_slow_draft_model_delay_no_step_for_long() -> None:
    model = PacedDraftModel(VOCAB, seconds_per_token=MAX_CATCH_UP_SECONDS / 40)
    node = make_node(model, max_batched_tokens=512)
    work = make_work("a", unshared_prompt(400, 1), 60)
    node.add_work(work)
    node.run()
    sizes = [batch.num_tokens for batch in model.batches]
    assert 400 / 42 < len([size for size in sizes if size > 20]) <= 400 / 40 + 2
    assert max(sizes) == 41
    assert node.emitted_tokens(work) == expected_tokens(work)


def test_an_attempt_that_goes_on_elsewhere_is_drafted_there() -> None:
    model = PacedDraftModel(VOCAB)
    node = make_node(model)
    emitted = paced_reference_tokens(PROMPT[:30], 25, VOCAB)
    work = make_work("a", PROMPT[:30], 70, emitted=emitted)
    node.add_work(work)
    node.run()
    assert node.emitted_tokens(work) == expected_tokens(work)
    assert draft_counter(node, "accepted") > 30


@pytest.mark.parametrize("num_blocks", [1, 3, 5])
def test_a_small_cache_of_the_draft_model_changes_no_token(num_blocks: int) -> None:
    """Sequences without room in it run without drafts."""
    model = PacedDraftModel(VOCAB, num_blocks=num_blocks)
    node = make_node(model)
    works = [make_work(number, unshared_prompt(5, number), 60 + number) for number in range(4)]
    for work in works:
        node.add_work(work)
    node.run()
    for work in works:
        assert node.emitted_tokens(work) == expected_tokens(work)
    assert (draft_counter(node, "accepted") > 20) == (num_blocks > 1)
    model.assert_nothing_is_held()


@pytest.mark.parametrize("seed", range(8))
def test_preemptions_and_cancellations_return_the_blocks(seed: int) -> None:
    dice = random.Random(seed)
    model = PacedDraftModel(VOCAB, num_blocks=12, error_share=0.2, seed=seed)
    node = make_node(model, num_blocks=9, max_num_seqs=4)
    pending = [
        make_work(number, unshared_prompt(dice.randint(1, 40), number), dice.randint(1, 60))
        for number in range(8)
    ]
    works = list(pending)
    cancelled = set()
    while pending or len(node.scheduler.sequences):
        if pending and dice.random() < 0.3:
            node.add_work(pending.pop())
        node.step()
        if dice.random() < 0.02:
            for sequence in node.scheduler.sequences:
                cancelled.add(sequence.key)
                node.scheduler.cancel_sequence(sequence.key)
    failed = {each.sequence.key for each in node.outcomes if isinstance(each, SequenceFailed)}
    for work in works:
        tokens, expected = node.emitted_tokens(work), expected_tokens(work)
        assert tokens == expected[: len(tokens)]
        assert work.key in failed | cancelled or tokens == expected
    assert node.pool.num_available_blocks == 9
    model.assert_nothing_is_held()


def test_a_context_that_is_too_long_for_the_draft_model_goes_on_without() -> None:
    model = PacedDraftModel(VOCAB, max_model_len=50)
    node = make_node(model)
    work = make_work("a", PROMPT[:30], 60)
    node.add_work(work)
    node.run()
    assert node.emitted_tokens(work) == expected_tokens(work)
    assert 10 < draft_counter(node, "accepted") <= 21
    assert all(
        slice_.start + len(slice_.token_ids) <= 50
        for batch in model.batches
        for slice_ in batch.slices
    )


def test_tokens_that_the_draft_model_does_not_know_end_its_drafts() -> None:
    model = PacedDraftModel(VOCAB // 2)
    node = make_node(model)
    prompt = [token % (VOCAB // 2) for token in PROMPT[:30]]
    work = make_work("a", prompt, 40)
    node.add_work(work)
    node.run()
    assert node.emitted_tokens(work) == expected_tokens(work)
    assert all(
        max(slice_.token_ids) < VOCAB // 2 for batch in model.batches for slice_ in batch.slices
    )


def test_a_draft_model_that_fails_is_not_asked_again() -> None:
    model = PacedDraftModel(VOCAB)
    node = make_node(model)
    work = make_work("a", PROMPT[:30], 60)
    node.add_work(work)
    while draft_counter(node, "accepted") < 8:
        node.step()
    model.is_broken = True
    before = len(model.batches)
    node.run()
    assert len(model.batches) == before + 1
    assert node.emitted_tokens(work) == expected_tokens(work)
    model.assert_nothing_is_held()


def test_nothing_is_drafted_beside_prompts() -> None:
    model = PacedDraftModel(VOCAB)
    node = make_node(model, max_batched_tokens=32)
    first = make_work("a", PROMPT[:30], 60)
    node.add_work(first)
    while not draft_counter(node, "accepted"):
        node.step()
    before = len(model.batches)
    second = make_work("b", unshared_prompt(300, 5), 20)
    node.add_work(second)
    for _ in range(8):
        node.step()
    assert len(model.batches) == before
    assert node.scheduler.speculator.drafting_seconds == 0.0
    node.run()
    for work in (first, second):
        assert node.emitted_tokens(work) == expected_tokens(work)


def run_sequences(node: SteppedNode, num_steps: int) -> list[bool]:
    """Run sequences one after the other, on a machine where a step takes 10 ms and a draft token
    0.5 ms of it; returns which steps had drafts."""
    with_drafts: list[bool] = []
    for _ in range(num_steps):
        if not len(node.scheduler.sequences):
            node.add_work(make_work(len(node.outcomes), unshared_prompt(10, len(with_drafts)), 80))
        batch = node.scheduler.schedule_step().batch
        assert batch is not None
        seconds = 0.01 + 0.0005 * batch.num_draft_tokens
        node.scheduler.prefill_budget.observe_step(batch, seconds)
        node.scheduler.speculator.observe_step(batch, seconds)
        node.outcomes += node.scheduler.update_from_results(batch, node.engine.run(batch))
        with_drafts.append(batch.num_draft_tokens > 0)
    return with_drafts


def test_a_slow_draft_model_is_given_up_and_tried_again_now_and_then() -> None:
    """Its drafts are right, and a draft token costs as much as two steps."""
    model = PacedDraftModel(VOCAB, seconds_per_step=0.02)
    node = make_node(model, max_draft_tokens=3)
    with_drafts = run_sequences(node, 4 * PROBE_INTERVAL_STEPS)
    assert sum(with_drafts[:PROBE_INTERVAL_STEPS]) <= 8
    assert 1 <= sum(with_drafts[PROBE_INTERVAL_STEPS:]) <= 8
    model.seconds_per_step = 0.0002
    with_drafts = run_sequences(node, 2 * PROBE_INTERVAL_STEPS)
    assert sum(with_drafts[-60:]) > 40, "fast now, as the next try has shown"


def test_wrong_drafts_are_given_up_and_tried_again_now_and_then() -> None:
    model = PacedDraftModel(VOCAB, error_share=1.0, seconds_per_step=0.002)
    node = make_node(model)
    with_drafts = run_sequences(node, 4 * PROBE_INTERVAL_STEPS)
    assert sum(with_drafts) <= 24
    model.error_share = 0.0
    with_drafts = run_sequences(node, 4 * PROBE_INTERVAL_STEPS)
    assert sum(with_drafts[-60:]) > 40


def test_probes_compute_few_contexts() -> None:
    """What a sequence lacks in the cache of a draft model that is given up grows with each step."""
    model = PacedDraftModel(
        VOCAB, num_blocks=512, error_share=1.0, seconds_per_step=0.002, seconds_per_token=0.001
    )
    node = make_node(model, num_blocks=512)
    node.add_work(make_work("a", PROMPT[:10], 4000))
    for _ in range(10):
        node.step()
    before = sum(batch.num_tokens for batch in model.batches)
    run_sequences(node, 12 * PROBE_INTERVAL_STEPS)
    computed = sum(batch.num_tokens for batch in model.batches) - before
    assert computed * 0.001 < 2 * MAX_PROBE_SHARE * 12 * PROBE_INTERVAL_STEPS * 0.01


def test_a_bias_of_tokens_that_the_draft_model_lacks_is_left_out() -> None:
    """Its logits may be fewer than those of the served model, whose ids a request may name."""
    model = PacedDraftModel(VOCAB - 8)
    node = make_node(model)
    bias = ((3, 1.0), (VOCAB - 9, -1.0), (VOCAB - 8, 2.0), (VOCAB - 1, 5.0))
    work = make_work("a", [1, 2, 3], 30, logit_bias=bias)
    node.add_work(work)
    node.run()
    specs = [
        slice_.sample_spec
        for batch in model.batches
        for slice_ in batch.slices
        if slice_.sample_spec
    ]
    assert specs
    assert {spec.params.logit_bias for spec in specs} == {bias[:2]}
