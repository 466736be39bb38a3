"""The matcher of one sequence: masks, tokens that are checked, ends, and states made again."""

import json
import math
import random

import pytest

from baton.types import GrammarKind
from node_engine.structured_output import grammar_state
from node_engine.structured_output.grammar_state import GrammarState
from node_engine.structured_output.token_masks import PendingMask
from tests.unit.node_engine.structured_output.grammars import (
    EOS,
    SCHEMA,
    TOKENIZERS,
    allowed_tokens,
    compile_text,
    grammar_tokenizer,
    request_mask,
)


def make_state(text: str, kind: GrammarKind, tokenizer: str = "byte_level") -> GrammarState:
    return GrammarState(compile_text(text, kind, tokenizer), request_mask)


def write_output(state: GrammarState, seed: int, longest: int = 300) -> list[int]:
    """Draw allowed tokens until the output is complete."""
    drawn = random.Random(seed)
    tokens: list[int] = []
    while not state.is_complete:
        tokens.append(drawn.choice(allowed_tokens(state.start_mask_computation(()))))
        assert state.accept_token(tokens[-1]) == ""
        assert len(tokens) < longest
    return tokens


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("seed", range(4))
def test_allowed_tokens_make_an_output_of_the_schema(tokenizer: str, seed: int) -> None:
    tokens = write_output(make_state(SCHEMA, GrammarKind.JSON, tokenizer), seed)
    text = grammar_tokenizer(tokenizer).decode_str([token for token in tokens if token != EOS])
    assert json.loads(text) in ({"é": 1}, {"é": None})


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_state_made_from_the_tokens_so_far_allows_the_same(tokenizer: str) -> None:
    tokens = write_output(make_state(SCHEMA, GrammarKind.JSON, tokenizer), seed=5)
    state = make_state(SCHEMA, GrammarKind.JSON, tokenizer)
    for number, token in enumerate(tokens):
        again = make_state(SCHEMA, GrammarKind.JSON, tokenizer)
        for earlier in tokens[:number]:
            assert again.accept_token(earlier) == ""
        assert allowed_tokens(again.start_mask_computation(())) == allowed_tokens(
            state.start_mask_computation(())
        )
        state.accept_token(token)


def test_the_end_is_allowed_exactly_where_the_grammar_accepts() -> None:
    state = make_state("a|ab+", GrammarKind.REGEX)
    a, b = (grammar_tokenizer().tokenize_str(text)[0] for text in "ab")
    assert EOS not in allowed_tokens(state.start_mask_computation(()))
    assert state.accept_token(EOS) != ""
    assert state.accept_token(a) == ""
    assert EOS in allowed_tokens(state.start_mask_computation(()))
    assert (state.accept_token(b), state.is_complete) == ("", False)
    assert (state.accept_token(EOS), state.is_complete) == ("", True)


def test_an_output_that_can_only_end_is_complete() -> None:
    state = make_state('["ab","ac"]', GrammarKind.CHOICE)
    a, b = (grammar_tokenizer().tokenize_str(text)[0] for text in "ab")
    state.accept_token(a)
    assert not state.is_complete
    state.accept_token(b)
    assert state.is_complete


def test_a_token_that_breaks_the_grammar_is_rejected_without_quoting_it() -> None:
    state = make_state("secret", GrammarKind.REGEX)
    (wrong,) = grammar_tokenizer().tokenize_str("z")
    reason = state.accept_token(wrong)
    assert f"token {wrong} is not allowed" in reason
    assert "secret" not in reason


def test_excluded_tokens_are_left_out_unless_nothing_else_is_allowed() -> None:
    state = make_state("a*", GrammarKind.REGEX)
    (a,) = grammar_tokenizer().tokenize_str("a")
    mask = state.start_mask_computation((EOS,))
    assert (EOS in allowed_tokens(mask), a in allowed_tokens(mask)) == (False, True)
    assert state.start_mask_computation(()) is mask, "one mask for each position"
    empty = make_state("", GrammarKind.REGEX)
    assert allowed_tokens(empty.start_mask_computation((EOS,))) == [EOS]


def test_tokens_that_the_model_does_not_have_are_left_out() -> None:
    """A tokenizer may have more tokens than the model: a mask of these alone allows nothing."""
    matcher = compile_text("z", GrammarKind.REGEX)
    (z,) = grammar_tokenizer().tokenize_str("z")
    assert z % 32, "in the last word of the mask"
    words = PendingMask(matcher, z, ()).wait_for_words()
    assert (words == -1).all(), "every token, of which the drawn one is then rejected"


def test_tokens_that_end_a_text_only_for_the_tokenizer_are_left_out() -> None:
    state = GrammarState(
        compile_text("a*", GrammarKind.REGEX), request_mask, excluded_token_ids=(EOS,)
    )
    assert EOS not in allowed_tokens(state.start_mask_computation(()))


def test_rolling_back_returns_to_the_state_before() -> None:
    state = make_state("abab", GrammarKind.REGEX)
    a, b = (grammar_tokenizer().tokenize_str(text)[0] for text in "ab")
    before = allowed_tokens(state.start_mask_computation(()))
    state.accept_token(a)
    state.start_mask_computation(())
    state.accept_token(b)
    state.roll_back(2)
    assert allowed_tokens(state.start_mask_computation(())) == before


def test_a_limit_that_is_reached_fails_the_next_token() -> None:
    """The mask then allows everything, so that the step goes on for the other sequences."""
    names = {f"p{number}": {"type": "string"} for number in range(3000)}
    failures: list[bool] = []
    state = GrammarState(
        compile_text(json.dumps({"type": "object", "properties": names})),
        request_mask,
        on_failed=lambda: failures.append(True),
    )
    (brace,) = grammar_tokenizer().tokenize_str("{")
    allowed_tokens(state.start_mask_computation(()))
    assert "limit" in (state.accept_token(brace) or state.accept_token(brace))
    assert failures


@pytest.fixture
def no_slow_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is: behind a slow mask a sequence is not drafted for."""
    monkeypatch.setattr(grammar_state, "SLOW_MASK_SECONDS", math.inf)


@pytest.mark.usefixtures("no_slow_masks")
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_masks_of_a_draft_are_those_after_each_of_its_tokens(tokenizer: str) -> None:
    tokens = write_output(make_state(SCHEMA, GrammarKind.JSON, tokenizer), seed=5)
    state = make_state(SCHEMA, GrammarKind.JSON, tokenizer)
    for number, token in enumerate(tokens):
        draft = tokens[number : number + 4]
        excluded = [(place,) for place in range(len(draft))]
        masks = state.start_draft_mask_computations(draft, excluded)
        # The token that completes the output has no successor.
        assert len(masks) == len(draft) - (number + len(draft) == len(tokens))
        later = make_state(SCHEMA, GrammarKind.JSON, tokenizer)
        for earlier in tokens[:number]:
            later.accept_token(earlier)
        for drafted, left_out, mask in zip(draft, excluded, masks, strict=False):
            later.accept_token(drafted)
            assert allowed_tokens(mask) == allowed_tokens(later.start_mask_computation(left_out))
        assert state.start_mask_computation(()).wait_for_words().any(), "the state is as before"
        assert state.accept_token(token) == ""


@pytest.mark.usefixtures("no_slow_masks")
def test_a_draft_ends_before_a_token_that_the_grammar_forbids() -> None:
    state = make_state("a|ab+", GrammarKind.REGEX)
    a, b = (grammar_tokenizer().tokenize_str(text)[0] for text in "ab")
    everywhere = [()] * 3
    assert len(state.start_draft_mask_computations([a, b, b], everywhere)) == 3
    assert len(state.start_draft_mask_computations([a, b, a], everywhere)) == 2
    assert len(state.start_draft_mask_computations([b, a, a], everywhere)) == 0
    state.start_mask_computation(())
    assert not state.start_draft_mask_computations([a, b, b], everywhere), (
        "another thread may use the matcher"
    )
