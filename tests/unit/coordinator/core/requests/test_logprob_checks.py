"""Logprobs: of every token shown, if asked for, and of the whole prompt before the first token."""

import pytest

from baton.cluster_link.messages import (
    CancelOrder,
    DecodeOrder,
    DecodeStarted,
    PrefillOrder,
    StepTokens,
)
from baton.errors import BatonError, LeaseExpired
from baton.types import AttemptKey, FinishReason, Incarnation, RequestId, TokenEvent, TokenLogprobs
from coordinator.core.common.effects import EmitPromptLogprobs, EmitTokens, FinishedResult
from coordinator.core.requests.record import RequestState
from tests.unit.coordinator.core.brain_harness import DECODE, PREFILL, BrainHarness

ONE = TokenLogprobs(-0.5, ((7, -0.5),))
TWO = TokenLogprobs(-1.5, ((3, -0.25),))
BARE = TokenLogprobs(-0.5)
WIDE = TokenLogprobs(-0.5, ((7, -0.5), (8, -1.0)))


def reserve(world: BrainHarness, prefill: Incarnation, decode: Incarnation) -> AttemptKey:
    key = world.last_attempt_key(decode)
    world.report_reserved(decode, key, prefill)
    return key


def test_logprobs_are_emitted_with_their_tokens(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit(logprobs=1)
    key = reserve(world, p0, d0)
    world.send_from_node(
        d0, StepTokens((TokenEvent(key, 0, 7, None, ONE), TokenEvent(key, 1, 3, None, TWO)))
    )
    world.report_token(d0, key, 2, finish=FinishReason.STOP, score=ONE)
    assert world.client_events(request) == [
        EmitTokens(request, (7, 3), (ONE, TWO)),
        EmitTokens(request, (7,), (ONE,)),
    ]


def test_unrequested_logprobs_are_not_emitted(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit()
    world.report_token(d0, reserve(world, p0, d0), 0, score=ONE)
    assert world.client_events(request) == [EmitTokens(request, (7,))]


def test_zero_top_logprobs_is_allowed(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit(logprobs=0)
    world.report_token(d0, reserve(world, p0, d0), 0, score=BARE)
    assert world.client_events(request) == [EmitTokens(request, (7,), (BARE,))]


@pytest.mark.parametrize("score", [None, BARE, WIDE], ids=["none", "too few", "too many"])
def test_token_without_requested_logprob_is_not_emitted(
    world: BrainHarness, p0: Incarnation, d0: Incarnation, score: TokenLogprobs | None
) -> None:
    request = world.submit(logprobs=1)
    key = reserve(world, p0, d0)
    world.send_from_node(
        d0, StepTokens((TokenEvent(key, 0, 7, None, ONE), TokenEvent(key, 1, 3, None, score)))
    )
    assert world.client_events(request) == [EmitTokens(request, (7,), (ONE,))]
    assert world.brain.counters.replaced_attempts == {"stale": 1}
    assert world.messages_to(d0, DecodeOrder)[-1].work.emitted_token_ids == (7,)


def test_top_logprobs_are_bounded_by_vocabulary() -> None:
    world = BrainHarness(mode="colocated")
    d0 = world.join_node("d0", DECODE, vocab_size=2)
    request = world.submit(logprobs=5)
    world.report_token(d0, world.last_attempt_key(d0), 0, score=WIDE)
    assert world.client_events(request) == [EmitTokens(request, (7,), (WIDE,))]


def test_prompt_logprobs_are_emitted_complete_before_first_token(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit(prompt=4, prompt_logprobs=1)
    assert world.messages_to(p0, PrefillOrder)[0].work.request.sampling.prompt_logprobs == 1
    key = reserve(world, p0, d0)
    world.report_prompt_logprobs(p0, key, 1, ONE, TWO)
    world.report_prompt_logprobs(p0, key, 3, ONE)
    assert world.client_events(request) == []
    world.report_prefill_ended(p0, key)
    world.report_token(d0, key, 0)
    world.report_token(d0, key, 1)
    assert world.client_events(request) == [
        EmitPromptLogprobs(request, (ONE, TWO, ONE)),
        EmitTokens(request, (7,)),
        EmitTokens(request, (7,)),
    ]


def test_tokens_are_buffered_until_prompt_logprobs_are_complete(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit(prompt=3, max_tokens=2, prompt_logprobs=1)
    key = reserve(world, p0, d0)
    world.send_from_node(d0, DecodeStarted(key, 0, 0, 3))
    world.report_token(d0, key, 0)
    world.report_token(d0, key, 1, token=8, finish=FinishReason.LENGTH)
    assert (world.client_events(request), world.end_events(request)) == ([], [])
    assert world.brain.count_attempts(p0) == 1, "it still owes the scores"
    world.report_prompt_logprobs(p0, key, 1, ONE, TWO)
    assert world.client_events(request) == [
        EmitPromptLogprobs(request, (ONE, TWO)),
        EmitTokens(request, (7, 8)),
    ]
    assert world.end_event(request).result == FinishedResult(FinishReason.LENGTH, 0)
    assert world.count_placed() == 0
    assert world.messages_to(p0, CancelOrder) == []


def owes(
    world: BrainHarness, prefill: Incarnation, decode: Incarnation
) -> tuple[RequestId, AttemptKey]:
    """A request whose output is complete but for one score of its prompt."""
    request = world.submit(prompt=3, max_tokens=2, prompt_logprobs=1)
    key = reserve(world, prefill, decode)
    world.report_prompt_logprobs(prefill, key, 1, ONE)
    world.send_from_node(
        decode, StepTokens((TokenEvent(key, 0, 7), TokenEvent(key, 1, 8, FinishReason.LENGTH)))
    )
    return request, key


def dies(world: BrainHarness, p0: Incarnation, d0: Incarnation, key: AttemptKey) -> None:
    world.join_node("p0-other", PREFILL)
    world.lose_node(p0)


def ends(world: BrainHarness, p0: Incarnation, d0: Incarnation, key: AttemptKey) -> None:
    world.report_prefill_ended(p0, key)


def hands_off(world: BrainHarness, p0: Incarnation, d0: Incarnation, key: AttemptKey) -> None:
    world.report_handed_off(p0, key)


def fails(world: BrainHarness, p0: Incarnation, d0: Incarnation, key: AttemptKey) -> None:
    world.report_failure(d0, key, LeaseExpired("late"))


def leaves_a_gap(world: BrainHarness, p0: Incarnation, d0: Incarnation, key: AttemptKey) -> None:
    world.report_prompt_logprobs(p0, key, 3, TWO)


def repeats(world: BrainHarness, p0: Incarnation, d0: Incarnation, key: AttemptKey) -> None:
    world.report_prompt_logprobs(p0, key, 1, TWO)


def says_nothing(world: BrainHarness, p0: Incarnation, d0: Incarnation, key: AttemptKey) -> None:
    world.report_prompt_logprobs(p0, key, 2)


def says_too_much(world: BrainHarness, p0: Incarnation, d0: Incarnation, key: AttemptKey) -> None:
    world.report_prompt_logprobs(p0, key, 2, TWO, TWO)


def names_too_few(world: BrainHarness, p0: Incarnation, d0: Incarnation, key: AttemptKey) -> None:
    world.report_prompt_logprobs(p0, key, 2, BARE)


def answers(world: BrainHarness, p0: Incarnation, d0: Incarnation, key: AttemptKey) -> None:
    world.report_token(p0, key, 0, finish=FinishReason.STOP)


def goes_on_for_ever(
    world: BrainHarness, p0: Incarnation, d0: Incarnation, key: AttemptKey
) -> None:
    world.report_token(d0, key, 2)


@pytest.mark.parametrize(
    "flaw",
    [
        *(
            dies,
            ends,
            hands_off,
            fails,
            leaves_a_gap,
            repeats,
            says_nothing,
            says_too_much,
            names_too_few,
            answers,
        ),
        goes_on_for_ever,
    ],
)
def test_incomplete_prompt_logprobs_emit_nothing_and_requeue(
    world: BrainHarness, p0: Incarnation, d0: Incarnation, flaw: object
) -> None:
    request, key = owes(world, p0, d0)
    flaw(world, p0, d0, key)  # type: ignore[operator]
    assert (world.client_events(request), world.end_events(request)) == ([], [])
    again = world.last_attempt_key(d0)
    assert (
        again.attempt_number,
        world.messages_to(d0, DecodeOrder)[-1].work.emitted_token_ids,
    ) == (2, ())
    assert world.messages_to(d0, DecodeOrder)[-1].work.request.sampling.prompt_logprobs == 1
    prefill = next(node for node in world.brain.node_registry.nodes if node.startswith("p0"))
    world.report_reserved(d0, again, prefill)
    world.report_prompt_logprobs(prefill, again, 1, TWO, TWO)
    world.report_token(d0, again, 0, finish=FinishReason.STOP)
    assert world.client_events(request) == [
        EmitPromptLogprobs(request, (TWO, TWO)),
        EmitTokens(request, (7,)),
    ]
    assert world.count_placed() == 0


def test_complete_prompt_logprobs_are_not_recomputed(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit(prompt=3, prompt_logprobs=1)
    key = reserve(world, p0, d0)
    world.report_prompt_logprobs(p0, key, 1, ONE, TWO)
    world.report_failure(d0, key, LeaseExpired("late"))
    assert world.messages_to(p0, PrefillOrder)[-1].work.request.sampling.prompt_logprobs is None
    again = reserve(world, p0, d0)
    world.report_token(d0, again, 0)
    assert world.client_events(request)[0] == EmitPromptLogprobs(request, (ONE, TWO))
    world.report_failure(d0, again, LeaseExpired("late"))
    world.advance(1.0)
    third = reserve(world, p0, d0)
    world.report_token(d0, third, 1)
    assert [type(effect) for effect in world.client_events(request)] == [
        EmitPromptLogprobs,
        EmitTokens,
        EmitTokens,
    ]


def test_full_prefix_hit_is_rejected_while_prompt_logprobs_are_due(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    world.submit(prompt=3, prompt_logprobs=1)
    world.report_reserved(d0, world.last_attempt_key(d0), None)
    assert world.brain.counters.replaced_attempts == {"stale": 1}
    assert world.last_attempt_key(p0).attempt_number == 2


def test_prompt_logprobs_are_accepted_only_from_computing_node(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit(prompt=2, prompt_logprobs=1)
    key = reserve(world, p0, d0)
    assert world.report_prompt_logprobs(d0, key, 1, ONE) == []
    assert world.brain.counters.dropped_messages == {"unexpected": 1}
    world.report_prompt_logprobs(p0, key, 1, TWO)
    assert world.report_prompt_logprobs(p0, key, 1, ONE) == []
    world.report_token(d0, key, 0)
    assert world.client_events(request)[0] == EmitPromptLogprobs(request, (TWO,))


def test_single_token_prompt_has_no_prompt_logprobs(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit(prompt=1, prompt_logprobs=1)
    key = reserve(world, p0, d0)
    assert world.messages_to(d0, DecodeOrder)[0].work.request.sampling.prompt_logprobs is None
    world.report_token(d0, key, 0)
    assert world.client_events(request) == [
        EmitPromptLogprobs(request, ()),
        EmitTokens(request, (7,)),
    ]


def test_prefill_alone_sends_prompt_logprobs_and_token(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit(prompt=2, max_tokens=1, prompt_logprobs=1, logprobs=1)
    key = world.last_attempt_key(p0)
    world.report_prompt_logprobs(p0, key, 1, TWO)
    world.report_token(p0, key, 0, finish=FinishReason.LENGTH, score=ONE)
    assert world.client_events(request) == [
        EmitPromptLogprobs(request, (TWO,)),
        EmitTokens(request, (7,), (ONE,)),
    ]


def test_colocated_decode_sends_prompt_logprobs() -> None:
    world = BrainHarness(mode="colocated")
    d0 = world.join_node("d0", DECODE)
    request = world.submit(prompt=2, prompt_logprobs=1)
    key = world.last_attempt_key(d0)
    world.send_from_node(d0, DecodeStarted(key, 2, 0, 0))
    world.report_prompt_logprobs(d0, key, 1, TWO)
    world.report_token(d0, key, 0)
    assert world.client_events(request) == [
        EmitPromptLogprobs(request, (TWO,)),
        EmitTokens(request, (7,)),
    ]


@pytest.mark.parametrize("error", [None, LeaseExpired("late")], ids=["cancelled", "failed"])
def test_partial_prompt_logprobs_are_dropped_with_attempt(
    world: BrainHarness, p0: Incarnation, d0: Incarnation, error: BatonError | None
) -> None:
    request, key = owes(world, p0, d0)
    attempt = world.brain.parts.table.records[request].attempt
    assert attempt is not None
    assert attempt.prompt_logprobs
    assert attempt.buffered_tokens
    if error is None:
        world.cancel(request)
        assert len(world.end_events(request)) == 1
    else:
        world.report_failure(p0, key, error)
        assert world.brain.get_request_state(request) is RequestState.PLACED
    assert (attempt.prompt_logprobs, attempt.buffered_tokens) == ([], [])
