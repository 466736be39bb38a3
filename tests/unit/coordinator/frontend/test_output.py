"""What is shown of a choice does not depend on how its tokens are cut into events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.types import TokenLogprobs
from coordinator.frontend.output import OutputChunk, OutputProcessor
from coordinator.generation import TokensEvent
from coordinator.text.detokenizer import Vocabulary
from tests.small_tokenizers import EOS_TOKEN, byte_level_tokenizer, byte_tokens

VOCABULARY = Vocabulary(byte_level_tokenizer())
END = byte_level_tokenizer().token_to_id(EOS_TOKEN)
CHUNKS = ["a", "b", "ab", "é", "日", "😀", "hello", " ", "\n"]


def process_in_steps(
    tokens: list[int], cuts: list[int], *, stop: list[str], scored: bool, unsearched: int = 0
) -> list[OutputChunk]:
    """`cuts` are the sizes of the events; what is left comes in one."""
    processor = OutputProcessor(
        0, VOCABULARY.create_detokenizer(), stop=stop, with_logprobs=scored, min_tokens=unsearched
    )
    pieces, place = [], 0
    for size in [*cuts, len(tokens)]:
        step = tuple(tokens[place : place + size])
        place += size
        if not step or processor.is_stopped:
            continue
        piece = processor.process_tokens(
            TokensEvent(
                step, tuple(TokenLogprobs(-float(token)) for token in step) if scored else ()
            )
        )
        pieces += [piece] if piece else []
    rest = processor.flush()
    return [
        *pieces,
        *([rest] if rest else []),
        OutputChunk(0, "", range(processor.output_tokens), is_prompt_echo=processor.is_stopped),
    ]


def concatenate_chunks(
    pieces: list[OutputChunk],
) -> tuple[str, list[int], list[float], list[int], int, bool]:
    *shown, end = pieces
    return (
        "".join(piece.text for piece in shown),
        [token for piece in shown for token in piece.token_ids],
        [score.logprob for piece in shown for score in piece.logprobs if score],
        [start for piece in shown for start in piece.text_offsets],
        len(end.token_ids),
        end.is_prompt_echo,
    )


TOKENS = st.lists(
    st.one_of(
        st.sampled_from(CHUNKS).map(lambda text: byte_level_tokenizer().encode(text).ids),
        st.sampled_from(CHUNKS).map(lambda text: byte_tokens(text.encode())),
        st.just([END]),
        st.integers(0, 319).map(lambda token: [token]),
    ),
    max_size=10,
).map(lambda groups: [token for group in groups for token in group])
STOPS = st.lists(
    st.sampled_from(["ab", "ba", "é", "日a", "😀", "hello h", "\n\n", "\ufffd"]), max_size=3
)


@pytest.mark.slow
@settings(max_examples=300)
@given(TOKENS, st.lists(st.integers(1, 4), max_size=20), STOPS, st.booleans(), st.integers(0, 3))
def test_output_does_not_depend_on_event_boundaries(
    tokens: list[int], cuts: list[int], stop: list[str], scored: bool, unsearched: int
) -> None:
    pieces = process_in_steps(tokens, cuts, stop=stop, scored=scored, unsearched=unsearched)
    text, listed, scores, starts, counted, stopped = concatenate_chunks(pieces)
    assert concatenate_chunks(
        process_in_steps(tokens, [1] * len(tokens), stop=stop, scored=scored, unsearched=unsearched)
    ) == concatenate_chunks(pieces)
    whole = byte_level_tokenizer().decode(tokens, skip_special_tokens=True)
    assert whole.startswith(text)
    assert tokens[: len(listed)] == listed
    if scored:
        assert scores == [-float(token) for token in listed]
        assert len(starts) == len(listed)
    if unsearched == 0:
        ends = [(whole.find(one) + len(one), whole.find(one)) for one in stop if one in whole]
        assert stopped == bool(ends)
        assert text == (whole[: min(ends)[1]] if ends else whole)
    if not stopped:
        assert (text, listed, counted) == (whole, tokens, len(tokens))
    else:
        assert byte_level_tokenizer().decode(listed).startswith(text)
        assert len(listed) <= counted <= len(tokens)


def test_stop_string_across_tokens_is_never_partly_emitted() -> None:
    tokens = byte_tokens(b"one<|en two<|end|> three")
    pieces = process_in_steps(tokens, [1] * 40, stop=["<|end|>"], scored=False)
    *shown, end = pieces
    assert "".join(piece.text for piece in shown) == "one<|en two"
    assert all("<" not in piece.text or piece.text.startswith("<|en ") for piece in shown)
    assert len(end.token_ids) == len(b"one<|en two<|end|>")


def test_tokens_after_the_stop_string_in_one_event_do_not_count() -> None:
    tokens = byte_tokens(b"a.b.")
    assert concatenate_chunks(process_in_steps(tokens, [4], stop=["."], scored=True))[4] == 2


def test_stop_strings_are_not_searched_within_min_tokens() -> None:
    tokens = byte_tokens(b"xxaxx")
    text, *_, counted, stopped = concatenate_chunks(
        process_in_steps(tokens, [], stop=["xx"], scored=False, unsearched=2)
    )
    assert (text, counted, stopped) == ("xxa", 5, True)
