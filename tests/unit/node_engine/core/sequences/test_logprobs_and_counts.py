"""What the scheduler asks engines to score and to count, and what it hands on, in order."""

from collections import Counter
from dataclasses import replace

import pytest

from baton.types import AttemptSpec, TicketId, TokenLogprobs
from node_engine.core.scheduling.capacity import CapacityRefusal
from node_engine.core.sequences.outcomes import (
    PrefillCompleted,
    PrefillRequeued,
    PromptLogprobsComputed,
    SequenceOutcome,
    TokenEmitted,
)
from node_engine.core.step.step_batch import SampleSpec, TokenCounts
from tests.paced_reference import paced_reference_logprobs
from tests.unit.node_engine.core.stepped_node import (
    BLOCK,
    VOCAB,
    SteppedNode,
    expected_tokens,
    make_work,
    transfer_kv,
)

PROMPT = tuple((17 * position) % 983 + 1 for position in range(150))
T = TicketId("t")


def with_sampling(work: AttemptSpec, **fields: object) -> AttemptSpec:
    sampling = replace(work.request.sampling, **fields)  # type: ignore[arg-type]
    return replace(work, request=replace(work.request, sampling=sampling))


def prompt_scores(
    outcomes: list[SequenceOutcome], work: AttemptSpec
) -> list[PromptLogprobsComputed]:
    return [
        each
        for each in outcomes
        if isinstance(each, PromptLogprobsComputed) and each.sequence.key == work.key
    ]


def check_prompt_scores(found: list[PromptLogprobsComputed], work: AttemptSpec, top: int) -> None:
    """Every token of the prompt but the first, in order, without a gap."""
    wanted = paced_reference_logprobs(work.request.prompt_token_ids, top, VOCAB)
    scores: list[TokenLogprobs] = []
    for each in found:
        assert each.first_position == len(scores) + 1
        scores += each.logprobs
    assert scores == wanted


# tokens


@pytest.mark.parametrize("top", [0, 5])
def test_tokens_are_scored_if_asked_for(top: int) -> None:
    node = SteppedNode()
    work, plain = (
        with_sampling(make_work("a", PROMPT[:20], 6), logprobs=top),
        make_work("b", PROMPT[:30], 6),
    )
    node.add_work(work)
    node.add_work(plain)
    node.run()
    events = [each.event for each in node.outcomes if isinstance(each, TokenEmitted)]
    scores = [event.logprobs for event in events if event.key == work.key]
    assert (
        scores == paced_reference_logprobs([*PROMPT[:20], *expected_tokens(work)], top, VOCAB)[19:]
    )
    assert {event.logprobs for event in events if event.key == plain.key} == {None}


def test_handoff_carries_the_first_tokens_score() -> None:
    prefill, decode = SteppedNode(), SteppedNode()
    work = with_sampling(make_work("a", PROMPT[:40], 3), logprobs=2)
    prefill.add_work(work, is_prefill_only=True)
    awaited = decode.scheduler.reserve_for_handoff(work, decode.root, T)
    assert not isinstance(awaited, CapacityRefusal)
    prefill.run()
    [completed] = prefill.outcomes
    assert isinstance(completed, PrefillCompleted)
    assert (
        completed.event.logprobs
        == paced_reference_logprobs([*PROMPT[:40], expected_tokens(work)[0]], 2, VOCAB)[-1]
    )
    decode.pool.reservations.mark_writing(T)
    [first] = decode.scheduler.commit_handoff(
        work.key, (completed.event.token_id,), completed.event.logprobs
    )
    assert isinstance(first, TokenEmitted)
    assert first.event == replace(completed.event)


# prompts


def test_a_prompt_is_scored_chunk_by_chunk_before_its_first_token() -> None:
    node = SteppedNode(max_batched_tokens=48)
    work, other = (
        with_sampling(make_work("a", PROMPT, 3), prompt_logprobs=4),
        make_work("b", PROMPT[::-1], 3),
    )
    node.add_work(other)
    node.add_work(work)
    node.run()
    found = prompt_scores(node.outcomes, work)
    assert len(found) > 2
    check_prompt_scores(found, work, 4)
    mine = [each for each in node.outcomes if each.sequence.key == work.key]
    assert mine[: len(found)] == found, "before the first token"
    assert node.emitted_tokens(work) == expected_tokens(work)
    assert not prompt_scores(node.outcomes, other)


@pytest.mark.parametrize("length", [1, 2, 16, 17])
def test_short_prompts(length: int) -> None:
    node, work = SteppedNode(), with_sampling(make_work("a", PROMPT[:length], 2), prompt_logprobs=0)
    node.add_work(work)
    node.run()
    check_prompt_scores(prompt_scores(node.outcomes, work), work, 0)
    assert node.emitted_tokens(work) == expected_tokens(work)


def test_scored_prompt_ignores_the_cache_and_is_cached_afterwards() -> None:
    node = SteppedNode()
    node.add_work(make_work("warm", PROMPT[:64], 1))
    node.run()
    work = with_sampling(make_work("a", PROMPT[:64], 2), prompt_logprobs=1)
    assert node.scheduler.estimate_admission(work, node.root).num_missing_tokens == 64
    sequence = node.add_work(work)
    node.run()
    assert sequence.num_cached_tokens == 0
    check_prompt_scores(prompt_scores(node.outcomes, work), work, 1)
    after = node.add_work(make_work("b", PROMPT[:64], 2))
    node.run()
    assert after.num_cached_tokens == 63


def test_decode_reserves_all_of_a_prompt_that_is_scored() -> None:
    prefill, decode = SteppedNode(), SteppedNode()
    decode.add_work(make_work("warm", PROMPT[:64], 1))
    decode.run()
    work = with_sampling(make_work("a", PROMPT[:64], 4), prompt_logprobs=1)
    awaited = decode.scheduler.reserve_for_handoff(work, decode.root, T)
    assert not isinstance(awaited, CapacityRefusal)
    assert len(awaited.reserved_blocks) == 4
    prefill.add_work(work, is_prefill_only=True)
    prefill.run()
    check_prompt_scores(prompt_scores(prefill.outcomes, work), work, 1)
    transfer_kv(prefill, decode, work.key, T)
    decode.run()
    assert decode.emitted_tokens(work) == expected_tokens(work)
    assert not prompt_scores(decode.outcomes, work)


def test_a_resumed_attempt_scores_the_prompt_alone() -> None:
    """Also in a chunk that begins behind the prompt, or ends just there."""
    for length in (15, 16, 17, 40):
        node = SteppedNode(max_batched_tokens=BLOCK, max_num_seqs=1)
        whole = make_work("a", PROMPT[:length], 60)
        work = with_sampling(
            replace(whole, emitted_token_ids=tuple(expected_tokens(whole)[:50])), prompt_logprobs=2
        )
        node.add_work(work)
        node.run()
        check_prompt_scores(prompt_scores(node.outcomes, work), work, 2)
        assert node.emitted_tokens(work) == expected_tokens(work)


def test_requeued_prefill_scores_its_prompt_anew() -> None:
    node = SteppedNode(num_blocks=10)
    work = with_sampling(make_work("a", PROMPT[:100], 4), prompt_logprobs=1)
    node.add_work(work, is_prefill_only=True)
    node.step()
    assert prompt_scores(node.outcomes, work)
    entitled = make_work("b", PROMPT[::-1][:100], 1)
    node.add_work(entitled)
    node.run()
    dropped = next(
        place for place, each in enumerate(node.outcomes) if isinstance(each, PrefillRequeued)
    )
    check_prompt_scores(prompt_scores(node.outcomes[dropped:], work), work, 1)
    assert node.emitted_tokens(entitled) == expected_tokens(entitled)


# penalties


def list_sample_specs(node: SteppedNode, work: AttemptSpec) -> list[SampleSpec]:
    return [
        slice_.sample_spec
        for batch in node.batches
        for slice_ in batch.slices
        if slice_.sample_spec is not None
    ]


@pytest.mark.parametrize(
    ("field", "counts_prompt"),
    [("presence_penalty", False), ("frequency_penalty", False), ("repetition_penalty", True)],
)
def test_penalties_count_the_output_of_every_attempt(field: str, counts_prompt: bool) -> None:
    whole = with_sampling(make_work("a", PROMPT[:20], 12, stop=()), **{field: 1.5})
    emitted = (7, 7, PROMPT[0], *expected_tokens(whole)[:4])
    work = replace(whole, emitted_token_ids=emitted)
    node = SteppedNode()
    sequence = node.add_work(work)
    seen = list(emitted)
    while node.step() is not None:
        [*_, spec] = list_sample_specs(node, work)
        assert spec.token_counts is not None
        counted = Counter(seen)
        tokens = {*seen, *PROMPT[:20]} if counts_prompt else set(seen)
        assert dict(
            zip(
                spec.token_counts.token_ids.tolist(),
                spec.token_counts.output_counts.tolist(),
                strict=True,
            )
        ) == {token: counted[token] for token in tokens}
        seen = list(sequence.output_token_ids)
    assert len(seen) == 12


def test_no_counts_without_penalties() -> None:
    node, work = SteppedNode(), make_work("a", PROMPT[:20], 4)
    sequence = node.add_work(work)
    node.run()
    assert sequence.token_counts is None
    assert all(spec.token_counts is None for spec in list_sample_specs(node, work))


def test_counts_are_of_the_step_that_is_tried_again() -> None:
    node, work = SteppedNode(), with_sampling(make_work("a", PROMPT[:20], 4), frequency_penalty=1.0)
    node.add_work(work)
    node.step()
    for _ in range(2):
        plan = node.scheduler.schedule_step()
        assert plan.batch is not None
        spec = plan.batch.slices[0].sample_spec
        assert spec is not None
        assert isinstance(spec.token_counts, TokenCounts)
        assert spec.token_counts.num_output_tokens == 1
        node.scheduler.abandon_step(plan.batch)


def test_requeued_prefill_counts_anew() -> None:
    node = SteppedNode(num_blocks=8)
    work = with_sampling(make_work("a", PROMPT[:100], 4), presence_penalty=1.0)
    sequence = node.add_work(work, is_prefill_only=True)
    while node.step() is not None:
        pass
    assert len(sequence.output_token_ids) == 1
    entitled = make_work("b", PROMPT[::-1][:100], 1)
    node.add_work(entitled)
    node.run()
    assert any(isinstance(each, PrefillRequeued) for each in node.outcomes)
    assert sequence.update_token_counts().num_output_tokens == len(sequence.output_token_ids)
