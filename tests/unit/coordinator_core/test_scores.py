"""Scores: of every token shown, if they were asked for, and of the whole prompt before the first token."""

import pytest

from baton.errors import BatonError, LeaseExpired
from baton.types import AttemptKey, FinishReason, Incarnation, RequestId, TokenEvent, TokenScore
from coordinator.core import messages as m
from coordinator.core.record import RequestState
from tests.unit.coordinator_core.world import DECODE, PREFILL, World

ONE = TokenScore(-0.5, ((7, -0.5),))
TWO = TokenScore(-1.5, ((3, -0.25),))
BARE = TokenScore(-0.5)
WIDE = TokenScore(-0.5, ((7, -0.5), (8, -1.0)))


def reserve(world: World, prefill: Incarnation, decode: Incarnation) -> AttemptKey:
    key = world.key(decode)
    world.reserve(decode, key, prefill)
    return key


def test_scores_go_with_their_tokens(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit(logprobs=1)
    key = reserve(world, p0, d0)
    world.say(d0, m.Tokens((TokenEvent(key, 0, 7, None, ONE), TokenEvent(key, 1, 3, None, TWO))))
    world.token(d0, key, 2, finish=FinishReason.STOP, score=ONE)
    assert world.shown(request) == [m.Emit(request, (7, 3), (ONE, TWO)), m.Emit(request, (7,), (ONE,))]


def test_scores_that_nobody_asked_for_stay_here(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit()
    world.token(d0, reserve(world, p0, d0), 0, score=ONE)
    assert world.shown(request) == [m.Emit(request, (7,))]


def test_no_alternatives_may_be_asked_for(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit(logprobs=0)
    world.token(d0, reserve(world, p0, d0), 0, score=BARE)
    assert world.shown(request) == [m.Emit(request, (7,), (BARE,))]


@pytest.mark.parametrize("score", [None, BARE, WIDE], ids=["none", "too few", "too many"])
def test_a_token_without_the_score_asked_is_not_shown(
    world: World, p0: Incarnation, d0: Incarnation, score: TokenScore | None
) -> None:
    request = world.submit(logprobs=1)
    key = reserve(world, p0, d0)
    world.say(d0, m.Tokens((TokenEvent(key, 0, 7, None, ONE), TokenEvent(key, 1, 3, None, score))))
    assert world.shown(request) == [m.Emit(request, (7,), (ONE,))]
    assert world.brain.counters.replaced == {"stale": 1}
    assert world.sent(d0, m.Submit)[-1].work.emitted == (7,)


def test_a_small_vocabulary_has_no_more_to_name() -> None:
    world = World(mode="colocated")
    d0 = world.join("d0", DECODE, vocab_size=2)
    request = world.submit(logprobs=5)
    world.token(d0, world.key(d0), 0, score=WIDE)
    assert world.shown(request) == [m.Emit(request, (7,), (WIDE,))]


def test_prompt_scores_come_whole_and_before_the_first_token(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit(prompt=4, prompt_logprobs=1)
    assert world.sent(p0, m.Prefill)[0].work.request.sampling.prompt_logprobs == 1
    key = reserve(world, p0, d0)
    world.prompt_scores(p0, key, 1, ONE, TWO)
    world.prompt_scores(p0, key, 3, ONE)
    assert world.shown(request) == []
    world.prefill_ended(p0, key)
    world.token(d0, key, 0)
    world.token(d0, key, 1)
    assert world.shown(request) == [
        m.EmitPromptScores(request, (ONE, TWO, ONE)),
        m.Emit(request, (7,)),
        m.Emit(request, (7,)),
    ]


def test_decode_may_be_faster_than_the_scores(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit(prompt=3, max_tokens=2, prompt_logprobs=1)
    key = reserve(world, p0, d0)
    world.say(d0, m.Admitted(key, 0, 0, 3))
    world.token(d0, key, 0)
    world.token(d0, key, 1, token=8, finish=FinishReason.LENGTH)
    assert (world.shown(request), world.ends(request)) == ([], [])
    assert world.brain.placed_on(p0) == 1, "it still owes the scores"
    world.prompt_scores(p0, key, 1, ONE, TWO)
    assert world.shown(request) == [m.EmitPromptScores(request, (ONE, TWO)), m.Emit(request, (7, 8))]
    assert world.end(request).result == m.Finished(FinishReason.LENGTH, 0)
    assert world.placed() == 0
    assert world.sent(p0, m.Cancel) == []


def owes(world: World, prefill: Incarnation, decode: Incarnation) -> tuple[RequestId, AttemptKey]:
    """A request whose output is complete but for one score of its prompt."""
    request = world.submit(prompt=3, max_tokens=2, prompt_logprobs=1)
    key = reserve(world, prefill, decode)
    world.prompt_scores(prefill, key, 1, ONE)
    world.say(decode, m.Tokens((TokenEvent(key, 0, 7), TokenEvent(key, 1, 8, FinishReason.LENGTH))))
    return request, key


def dies(world: World, p0: Incarnation, d0: Incarnation, key: AttemptKey) -> None:
    world.join("p0-other", PREFILL)
    world.gone(p0)


def ends(world: World, p0: Incarnation, d0: Incarnation, key: AttemptKey) -> None:
    world.prefill_ended(p0, key)


def hands_off(world: World, p0: Incarnation, d0: Incarnation, key: AttemptKey) -> None:
    world.handed_off(p0, key)


def fails(world: World, p0: Incarnation, d0: Incarnation, key: AttemptKey) -> None:
    world.fail(d0, key, LeaseExpired("late"))


def leaves_a_gap(world: World, p0: Incarnation, d0: Incarnation, key: AttemptKey) -> None:
    world.prompt_scores(p0, key, 3, TWO)


def repeats(world: World, p0: Incarnation, d0: Incarnation, key: AttemptKey) -> None:
    world.prompt_scores(p0, key, 1, TWO)


def says_nothing(world: World, p0: Incarnation, d0: Incarnation, key: AttemptKey) -> None:
    world.prompt_scores(p0, key, 2)


def says_too_much(world: World, p0: Incarnation, d0: Incarnation, key: AttemptKey) -> None:
    world.prompt_scores(p0, key, 2, TWO, TWO)


def names_too_few(world: World, p0: Incarnation, d0: Incarnation, key: AttemptKey) -> None:
    world.prompt_scores(p0, key, 2, BARE)


def answers(world: World, p0: Incarnation, d0: Incarnation, key: AttemptKey) -> None:
    world.token(p0, key, 0, finish=FinishReason.STOP)


def goes_on_for_ever(world: World, p0: Incarnation, d0: Incarnation, key: AttemptKey) -> None:
    world.token(d0, key, 2)


@pytest.mark.parametrize(
    "flaw",
    [
        *(dies, ends, hands_off, fails, leaves_a_gap, repeats, says_nothing, says_too_much, names_too_few, answers),
        goes_on_for_ever,
    ],
)
def test_without_all_scores_nothing_is_shown_and_another_attempt_starts_over(
    world: World, p0: Incarnation, d0: Incarnation, flaw: object
) -> None:
    request, key = owes(world, p0, d0)
    flaw(world, p0, d0, key)  # type: ignore[operator]
    assert (world.shown(request), world.ends(request)) == ([], [])
    again = world.key(d0)
    assert (again.attempt, world.sent(d0, m.Submit)[-1].work.emitted) == (2, ())
    assert world.sent(d0, m.Submit)[-1].work.request.sampling.prompt_logprobs == 1
    prefill = next(node for node in world.brain.registry.nodes if node.startswith("p0"))
    world.reserve(d0, again, prefill)
    world.prompt_scores(prefill, again, 1, TWO, TWO)
    world.token(d0, again, 0, finish=FinishReason.STOP)
    assert world.shown(request) == [m.EmitPromptScores(request, (TWO, TWO)), m.Emit(request, (7,))]
    assert world.placed() == 0


def test_complete_scores_are_not_computed_again(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit(prompt=3, prompt_logprobs=1)
    key = reserve(world, p0, d0)
    world.prompt_scores(p0, key, 1, ONE, TWO)
    world.fail(d0, key, LeaseExpired("late"))
    assert world.sent(p0, m.Prefill)[-1].work.request.sampling.prompt_logprobs is None
    again = reserve(world, p0, d0)
    world.token(d0, again, 0)
    assert world.shown(request)[0] == m.EmitPromptScores(request, (ONE, TWO))
    world.fail(d0, again, LeaseExpired("late"))
    world.advance(1.0)
    third = reserve(world, p0, d0)
    world.token(d0, third, 1)
    assert [type(effect) for effect in world.shown(request)] == [m.EmitPromptScores, m.Emit, m.Emit]


def test_decode_that_claims_to_hold_the_prompt_is_not_believed(world: World, p0: Incarnation, d0: Incarnation) -> None:
    world.submit(prompt=3, prompt_logprobs=1)
    world.reserve(d0, world.key(d0), None)
    assert world.brain.counters.replaced == {"stale": 1}
    assert world.key(p0).attempt == 2


def test_only_who_computes_the_prompt_scores_it(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit(prompt=2, prompt_logprobs=1)
    key = reserve(world, p0, d0)
    assert world.prompt_scores(d0, key, 1, ONE) == []
    assert world.brain.counters.dropped_messages == {"unexpected": 1}
    world.prompt_scores(p0, key, 1, TWO)
    assert world.prompt_scores(p0, key, 1, ONE) == []
    world.token(d0, key, 0)
    assert world.shown(request)[0] == m.EmitPromptScores(request, (TWO,))


def test_one_token_has_no_score(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit(prompt=1, prompt_logprobs=1)
    key = reserve(world, p0, d0)
    assert world.sent(d0, m.Submit)[0].work.request.sampling.prompt_logprobs is None
    world.token(d0, key, 0)
    assert world.shown(request) == [m.EmitPromptScores(request, ()), m.Emit(request, (7,))]


def test_prefill_alone_scores_and_answers(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit(prompt=2, max_tokens=1, prompt_logprobs=1, logprobs=1)
    key = world.key(p0)
    world.prompt_scores(p0, key, 1, TWO)
    world.token(p0, key, 0, finish=FinishReason.LENGTH, score=ONE)
    assert world.shown(request) == [m.EmitPromptScores(request, (TWO,)), m.Emit(request, (7,), (ONE,))]


def test_colocated_decode_scores_the_prompt() -> None:
    world = World(mode="colocated")
    d0 = world.join("d0", DECODE)
    request = world.submit(prompt=2, prompt_logprobs=1)
    key = world.key(d0)
    world.say(d0, m.Admitted(key, 2, 0, 0))
    world.prompt_scores(d0, key, 1, TWO)
    world.token(d0, key, 0)
    assert world.shown(request) == [m.EmitPromptScores(request, (TWO,)), m.Emit(request, (7,))]


@pytest.mark.parametrize("error", [None, LeaseExpired("late")], ids=["cancelled", "failed"])
def test_nothing_is_kept_of_an_attempt_that_is_over(
    world: World, p0: Incarnation, d0: Incarnation, error: BatonError | None
) -> None:
    request, key = owes(world, p0, d0)
    attempt = world.brain._table.records[request].attempt
    assert attempt is not None
    assert attempt.prompt_scores
    assert attempt.held
    if error is None:
        world.cancel(request)
        assert len(world.ends(request)) == 1
    else:
        world.fail(p0, key, error)
        assert world.brain.state(request) is RequestState.PLACED
    assert (attempt.prompt_scores, attempt.held) == ([], [])
