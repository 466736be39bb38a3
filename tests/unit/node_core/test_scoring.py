"""What the scheduler asks engines to score and to count, and what it hands on, in order."""

from collections import Counter
from dataclasses import replace

import pytest

from baton.types import TicketId, Work
from node_engine.core.outcome import Dropped, Emitted, Outcome, PrefillCompleted, PromptScored
from node_engine.core.residency import Refusal
from node_engine.core.step import SampleSpec
from node_engine.paced import paced_scores
from tests.unit.node_core.nodes import BLOCK, VOCAB, Node, deliver, expected, work

PROMPT = tuple((17 * position) % 983 + 1 for position in range(150))
T = TicketId("t")


def asking(job: Work, **fields: object) -> Work:
    sampling = replace(job.request.sampling, **fields)  # type: ignore[arg-type]
    return replace(job, request=replace(job.request, sampling=sampling))


def prompt_scores(outcomes: list[Outcome], job: Work) -> list[PromptScored]:
    return [each for each in outcomes if isinstance(each, PromptScored) and each.sequence.key == job.key]


def check_prompt_scores(found: list[PromptScored], job: Work, top: int) -> None:
    """Every token of the prompt but the first, in order, without a gap."""
    wanted = paced_scores(job.request.prompt, top, VOCAB)
    scores = []
    for each in found:
        assert each.first == len(scores) + 1
        scores += each.scores
    assert scores == wanted


# tokens


@pytest.mark.parametrize("top", [0, 5])
def test_tokens_are_scored_if_asked_for(top: int) -> None:
    node = Node()
    job, plain = asking(work("a", PROMPT[:20], 6), logprobs=top), work("b", PROMPT[:30], 6)
    node.add(job)
    node.add(plain)
    node.run()
    events = [each.event for each in node.outcomes if isinstance(each, Emitted)]
    scores = [event.score for event in events if event.key == job.key]
    assert scores == paced_scores([*PROMPT[:20], *expected(job)], top, VOCAB)[19:]
    assert {event.score for event in events if event.key == plain.key} == {None}


def test_the_first_tokens_score_crosses_with_it() -> None:
    prefill, decode = Node(), Node()
    job = asking(work("a", PROMPT[:40], 3), logprobs=2)
    prefill.add(job, hand_off=True)
    awaited = decode.scheduler.expect(job, decode.root, T)
    assert not isinstance(awaited, Refusal)
    prefill.run()
    [completed] = prefill.outcomes
    assert isinstance(completed, PrefillCompleted)
    assert completed.event.score == paced_scores([*PROMPT[:40], expected(job)[0]], 2, VOCAB)[-1]
    decode.pool.mark_writing(T)
    [first] = decode.scheduler.adopt(job.key, (completed.event.token,), completed.event.score)
    assert isinstance(first, Emitted)
    assert first.event == replace(completed.event)


# prompts


def test_a_prompt_is_scored_chunk_by_chunk_before_its_first_token() -> None:
    node = Node(max_batched_tokens=48)
    job, other = asking(work("a", PROMPT, 3), prompt_logprobs=4), work("b", PROMPT[::-1], 3)
    node.add(other)
    node.add(job)
    node.run()
    found = prompt_scores(node.outcomes, job)
    assert len(found) > 2
    check_prompt_scores(found, job, 4)
    mine = [each for each in node.outcomes if each.sequence.key == job.key]
    assert mine[: len(found)] == found, "before the first token"
    assert node.emitted(job) == expected(job)
    assert not prompt_scores(node.outcomes, other)


@pytest.mark.parametrize("length", [1, 2, 16, 17])
def test_short_prompts(length: int) -> None:
    node, job = Node(), asking(work("a", PROMPT[:length], 2), prompt_logprobs=0)
    node.add(job)
    node.run()
    check_prompt_scores(prompt_scores(node.outcomes, job), job, 0)
    assert node.emitted(job) == expected(job)


def test_what_is_cached_is_computed_again_to_score_it_and_shared_afterwards() -> None:
    node = Node()
    node.add(work("warm", PROMPT[:64], 1))
    node.run()
    job = asking(work("a", PROMPT[:64], 2), prompt_logprobs=1)
    assert node.scheduler.survey(job, node.root).lacking == 64
    sequence = node.add(job)
    node.run()
    assert sequence.num_cached == 0
    check_prompt_scores(prompt_scores(node.outcomes, job), job, 1)
    after = node.add(work("b", PROMPT[:64], 2))
    node.run()
    assert after.num_cached == 63


def test_decode_reserves_all_of_a_prompt_that_is_scored() -> None:
    prefill, decode = Node(), Node()
    decode.add(work("warm", PROMPT[:64], 1))
    decode.run()
    job = asking(work("a", PROMPT[:64], 4), prompt_logprobs=1)
    awaited = decode.scheduler.expect(job, decode.root, T)
    assert not isinstance(awaited, Refusal)
    assert len(awaited.promised) == 4
    prefill.add(job, hand_off=True)
    prefill.run()
    check_prompt_scores(prompt_scores(prefill.outcomes, job), job, 1)
    deliver(prefill, decode, job.key, T)
    decode.run()
    assert decode.emitted(job) == expected(job)
    assert not prompt_scores(decode.outcomes, job)


def test_a_resumed_attempt_scores_the_prompt_alone() -> None:
    """Also in a chunk that begins behind the prompt, or ends just there."""
    for length in (15, 16, 17, 40):
        node = Node(max_batched_tokens=BLOCK, max_num_seqs=1)
        whole = work("a", PROMPT[:length], 60)
        job = asking(replace(whole, emitted=tuple(expected(whole)[:50])), prompt_logprobs=2)
        node.add(job)
        node.run()
        check_prompt_scores(prompt_scores(node.outcomes, job), job, 2)
        assert node.emitted(job) == expected(job)


def test_who_is_dropped_scores_its_prompt_anew() -> None:
    node = Node(num_blocks=10)
    job = asking(work("a", PROMPT[:100], 4), prompt_logprobs=1)
    node.add(job, hand_off=True)
    node.step()
    assert prompt_scores(node.outcomes, job)
    firm = work("b", PROMPT[::-1][:100], 1)
    node.add(firm)
    node.run()
    dropped = next(place for place, each in enumerate(node.outcomes) if isinstance(each, Dropped))
    check_prompt_scores(prompt_scores(node.outcomes[dropped:], job), job, 1)
    assert node.emitted(firm) == expected(firm)


# penalties


def sampled(node: Node, job: Work) -> list[SampleSpec]:
    return [piece.sample for batch in node.batches for piece in batch.slices if piece.sample is not None]


@pytest.mark.parametrize(
    ("field", "counts_prompt"),
    [("presence_penalty", False), ("frequency_penalty", False), ("repetition_penalty", True)],
)
def test_penalties_count_the_output_of_every_attempt(field: str, counts_prompt: bool) -> None:
    whole = asking(work("a", PROMPT[:20], 12, stop=()), **{field: 1.5})
    emitted = (7, 7, PROMPT[0], *expected(whole)[:4])
    job = replace(whole, emitted=emitted)
    node = Node()
    sequence = node.add(job)
    seen = list(emitted)
    while node.step() is not None:
        [*_, spec] = sampled(node, job)
        assert spec.counts is not None
        counted = Counter(seen)
        tokens = {*seen, *PROMPT[:20]} if counts_prompt else set(seen)
        assert dict(zip(spec.counts.ids.tolist(), spec.counts.in_output.tolist(), strict=True)) == {
            token: counted[token] for token in tokens
        }
        seen = list(sequence.output)
    assert len(seen) == 12


def test_who_has_no_penalty_counts_nothing() -> None:
    node, job = Node(), work("a", PROMPT[:20], 4)
    sequence = node.add(job)
    node.run()
    assert sequence.counts is None
    assert all(spec.counts is None for spec in sampled(node, job))


def test_counts_are_of_the_step_that_is_tried_again() -> None:
    node, job = Node(), asking(work("a", PROMPT[:20], 4), frequency_penalty=1.0)
    node.add(job)
    node.step()
    for _ in range(2):
        plan = node.scheduler.next_step()
        assert plan.batch is not None
        spec = plan.batch.slices[0].sample
        assert spec is not None
        assert spec.counts is not None
        assert spec.counts.num_output == 1
        node.scheduler.abandon(plan.batch)


def test_who_is_dropped_counts_anew() -> None:
    node = Node(num_blocks=8)
    job = asking(work("a", PROMPT[:100], 4), presence_penalty=1.0)
    sequence = node.add(job, hand_off=True)
    while node.step() is not None:
        pass
    assert len(sequence.output) == 1
    firm = work("b", PROMPT[::-1][:100], 1)
    node.add(firm)
    node.run()
    assert any(isinstance(each, Dropped) for each in node.outcomes)
    assert sequence.counted().num_output == len(sequence.output)
