"""A sequence whose masks take long stays out of steps, and is told when it may join them."""

import threading
from typing import cast

import pytest
from llguidance import LLMatcher

from baton.errors import GrammarFailed
from baton.process.clock import FakeClock
from baton.types import (
    AttemptKey,
    AttemptSpec,
    GrammarKind,
    Request,
    RequestId,
    SamplingParams,
    StructuredOutput,
)
from node_engine.structured_output.constraint_factory import ConstraintFactory
from node_engine.structured_output.grammar_state import SLOW_MASK_SECONDS, GrammarState
from node_engine.structured_output.token_masks import MaskThread, PendingMask
from tests.unit.node_engine.structured_output.grammars import (
    EOS,
    VOCAB,
    allowed_tokens,
    compile_text,
    grammar_tokenizer,
    save_tokenizer,
)


class SteppedClock(FakeClock):
    """A clock that advances by `step` seconds whenever it is read."""

    step = 0.0

    def __call__(self) -> float:
        self.advance(self.step)
        return super().__call__()


def test_a_slow_mask_holds_the_next_step_back_until_it_is_computed() -> None:
    clock = SteppedClock()
    awaited: list[bool] = []

    def request_mask(
        matcher: LLMatcher, excluded: tuple[int, ...], *, is_awaited: bool
    ) -> PendingMask:
        awaited.append(is_awaited)
        return PendingMask(matcher, VOCAB, excluded, clock)

    state = GrammarState(compile_text("a+", GrammarKind.REGEX), request_mask)
    (a,) = grammar_tokenizer().tokenize_str("a")
    assert state.can_join_step(())
    clock.step = 2 * SLOW_MASK_SECONDS
    allowed_tokens(state.start_mask_computation(()))
    assert state.accept_token(a) == ""
    assert not state.can_join_step(())
    clock.step = 0.0
    allowed_tokens(state.start_mask_computation(()))
    assert state.can_join_step(())
    assert state.accept_token(a) == ""
    assert state.can_join_step(()), "the last mask was not slow"
    assert awaited == [False, True]


def test_the_mask_thread_tells_when_an_awaited_mask_is_computed() -> None:
    thread, computed = MaskThread(), threading.Event()
    thread.on_awaited_mask = computed.set
    matcher = compile_text("a+", GrammarKind.REGEX)
    plain = thread.request_mask(matcher, VOCAB, (), is_awaited=False)
    plain.wait_for_words()
    assert not computed.is_set()
    mask = thread.request_mask(matcher, VOCAB, (), is_awaited=True)
    assert computed.wait(60)
    assert mask.is_ready
    thread.close()


def make_factory() -> ConstraintFactory:
    return ConstraintFactory(
        save_tokenizer("byte_level"),
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        max_grammars=1,
        clock=FakeClock(),
    )


class BrokenMatcher:
    def compute_bitmask(self) -> bytes:
        raise RuntimeError("a defect")


def test_a_mask_that_cannot_be_computed_holds_nobody_back_and_does_not_end_the_thread() -> None:
    thread, computed = MaskThread(), threading.Semaphore(0)
    thread.on_awaited_mask = computed.release
    broken = thread.request_mask(cast(LLMatcher, BrokenMatcher()), VOCAB, (), is_awaited=True)
    assert computed.acquire(timeout=60)
    assert broken.is_ready, "the step that needs the mask gets the error"
    with pytest.raises(RuntimeError, match="a defect"):
        broken.wait_for_words()
    thread.request_mask(compile_text("a", GrammarKind.REGEX), VOCAB, (), is_awaited=True)
    assert computed.acquire(timeout=60)
    thread.close()


@pytest.mark.parametrize(("min_tokens", "may_end"), [(0, True), (2, True), (3, False)])
def test_the_first_mask_is_computed_before_a_step_needs_it(
    monkeypatch: pytest.MonkeyPatch, min_tokens: int, *, may_end: bool
) -> None:
    def refuse_request(*_: object, **__: object) -> None:
        raise AssertionError("the mask is computed when a step asks for it")

    monkeypatch.setattr(MaskThread, "request_mask", refuse_request)
    factory = make_factory()
    (a,) = grammar_tokenizer().tokenize_str("a")
    grammar = StructuredOutput(GrammarKind.REGEX, "a*")
    sampling = SamplingParams(8, structured_output=grammar, min_tokens=min_tokens)
    state = factory.make_constraint(make_attempt_spec(sampling, emitted=(a, a)))
    mask = state.start_mask_computation(())
    assert mask.is_ready
    assert set(allowed_tokens(mask)) == ({a, EOS} if may_end else {a})
    factory.close()


def test_a_complete_output_needs_no_first_mask() -> None:
    factory = make_factory()
    (a,) = grammar_tokenizer().tokenize_str("a")
    grammar = StructuredOutput(GrammarKind.REGEX, "a")
    sampling = SamplingParams(8, structured_output=grammar)
    assert factory.make_constraint(make_attempt_spec(sampling, emitted=(a,))).is_complete
    factory.close()


def make_attempt_spec(sampling: SamplingParams, emitted: tuple[int, ...]) -> AttemptSpec:
    request = Request(RequestId("a"), (1,), sampling, 60.0)
    return AttemptSpec(AttemptKey(request.id, 0, 0), request, emitted_token_ids=emitted)


def test_emitted_tokens_are_consumed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """llguidance holds Python's lock meanwhile: 0.1 seconds for 40,000 tokens."""
    sizes: list[int] = []

    class CountingMatcher:
        def try_consume_tokens(self, tokens: list[int]) -> int:
            sizes.append(len(tokens))
            return min(len(tokens), 1200 - sum(sizes[:-1]))

        def is_stopped(self) -> bool:
            return True

    factory = make_factory()
    monkeypatch.setattr(factory.cache, "get_matcher", lambda grammar: CountingMatcher())
    sampling = SamplingParams(4, structured_output=StructuredOutput(GrammarKind.REGEX, "a*"))
    factory.make_constraint(make_attempt_spec(sampling, emitted=(5,) * 1200))
    assert (sum(sizes), max(sizes)) == (1200, 512)
    sizes.clear()
    with pytest.raises(GrammarFailed, match="that were emitted before"):
        factory.make_constraint(make_attempt_spec(sampling, emitted=(5,) * 1201))
    factory.close()


def test_the_threads_of_a_factory_end_when_it_is_closed() -> None:
    before = set(threading.enumerate())
    factory = make_factory()
    started = set(threading.enumerate()) - before
    assert {thread.name for thread in started} >= {"masks"}
    factory.close()
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()
