"""What is shown of a choice does not depend on how its tokens are cut into events."""

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.types import TokenScore
from coordinator.detokenizer import Vocabulary
from coordinator.generation import Delta
from coordinator.telling import Piece, Teller
from tests.integration.front_text import EOS, byte_level, byte_tokens

VOCABULARY = Vocabulary(byte_level())
END = byte_level().token_to_id(EOS)
CHUNKS = ["a", "b", "ab", "é", "日", "😀", "hello", " ", "\n"]


def tell(tokens: list[int], cuts: list[int], *, stop: list[str], scored: bool, unsearched: int = 0) -> list[Piece]:
    """`cuts` are the sizes of the events; what is left comes in one."""
    teller = Teller(0, VOCABULARY.detokenizer(), stop=stop, scored=scored, unsearched=unsearched)
    pieces, place = [], 0
    for size in [*cuts, len(tokens)]:
        step = tuple(tokens[place : place + size])
        place += size
        if not step or teller.stopped:
            continue
        piece = teller.tell(Delta(step, tuple(TokenScore(-float(token)) for token in step) if scored else ()))
        pieces += [piece] if piece else []
    rest = teller.rest()
    return [*pieces, *([rest] if rest else []), Piece(0, "", range(teller.tokens), echo=teller.stopped)]


def together(pieces: list[Piece]) -> tuple[str, list[int], list[float], list[int], int, bool]:
    *shown, end = pieces
    return (
        "".join(piece.text for piece in shown),
        [token for piece in shown for token in piece.tokens],
        [score.logprob for piece in shown for score in piece.scores if score],
        [start for piece in shown for start in piece.starts],
        len(end.tokens),
        end.echo,
    )


TOKENS = st.lists(
    st.one_of(
        st.sampled_from(CHUNKS).map(lambda text: byte_level().encode(text).ids),
        st.sampled_from(CHUNKS).map(lambda text: byte_tokens(text.encode())),
        st.just([END]),
        st.integers(0, 319).map(lambda token: [token]),
    ),
    max_size=10,
).map(lambda groups: [token for group in groups for token in group])
STOPS = st.lists(st.sampled_from(["ab", "ba", "é", "日a", "😀", "hello h", "\n\n", "\ufffd"]), max_size=3)


@settings(max_examples=300)
@given(TOKENS, st.lists(st.integers(1, 4), max_size=20), STOPS, st.booleans(), st.integers(0, 3))
def test_any_split_tells_the_same(
    tokens: list[int], cuts: list[int], stop: list[str], scored: bool, unsearched: int
) -> None:
    pieces = tell(tokens, cuts, stop=stop, scored=scored, unsearched=unsearched)
    text, listed, scores, starts, counted, stopped = together(pieces)
    assert together(tell(tokens, [1] * len(tokens), stop=stop, scored=scored, unsearched=unsearched)) == together(
        pieces
    )
    whole = byte_level().decode(tokens, skip_special_tokens=True)
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
        assert byte_level().decode(listed).startswith(text)
        assert len(listed) <= counted <= len(tokens)


def test_a_stop_string_over_token_boundaries_is_never_shown_in_part() -> None:
    tokens = byte_tokens(b"one<|en two<|end|> three")
    pieces = tell(tokens, [1] * 40, stop=["<|end|>"], scored=False)
    *shown, end = pieces
    assert "".join(piece.text for piece in shown) == "one<|en two"
    assert all("<" not in piece.text or piece.text.startswith("<|en ") for piece in shown)
    assert len(end.tokens) == len(b"one<|en two<|end|>")


def test_tokens_after_the_stop_string_in_one_event_do_not_count() -> None:
    tokens = byte_tokens(b"a.b.")
    assert together(tell(tokens, [4], stop=["."], scored=True))[4] == 2


def test_the_first_tokens_may_spell_a_stop_string() -> None:
    tokens = byte_tokens(b"xxaxx")
    text, *_, counted, stopped = together(tell(tokens, [], stop=["xx"], scored=False, unsearched=2))
    assert (text, counted, stopped) == ("xxa", 5, True)
