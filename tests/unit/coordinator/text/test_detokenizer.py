"""Streamed text is the tokenizer's own decoding, cut anywhere, and shows no half characters."""

import functools
from collections.abc import Callable
from typing import Any, cast

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from coordinator.text.detokenizer import Vocabulary
from tests.small_tokenizers import EOS_TOKEN, byte_level_tokenizer, byte_tokens, token_id

WORDS = [
    "▁",
    "▁hello",
    "hello",
    "▁wörld",
    "日",
    "本",
    "😀",
    "a",
    "b",
    " ",
    ".",
    "\ufffd",
    "▁▁",
    "e\u0301",
    "\u0301",
]


@functools.cache
def byte_level_with_additions() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(byte_level_tokenizer().to_str())
    tokenizer.add_special_tokens([AddedToken("<|tool|>", special=True)])
    tokenizer.add_tokens(
        [AddedToken("two words"), AddedToken("ünï"), AddedToken("\u00a0"), AddedToken("€")]
    )
    return tokenizer


@functools.cache
def sentencepiece() -> tokenizers.Tokenizer:
    """Llama 2's kind: pieces with ▁ for spaces, bytes as a fallback, the first space dropped."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    model = models.BPE({piece: place for place, piece in enumerate(pieces)}, [], byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


@functools.cache
def metaspace() -> tokenizers.Tokenizer:
    """T5's kind."""
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({word: place for place, word in enumerate(WORDS)}, "a")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


@functools.cache
def bare() -> tokenizers.Tokenizer:
    """No decoder: words joined by spaces."""
    return tokenizers.Tokenizer(
        models.WordLevel({"one": 0, "two": 1, "drei": 2, "\ufffd": 3}, "one")
    )


@functools.cache
def byte_level_among_others() -> tokenizers.Tokenizer:
    """Bytes are one step of decoding among several. A piece may end in the middle of a
    character."""
    tokenizer = tokenizers.Tokenizer.from_str(byte_level_with_additions().to_str())
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteLevel(), decoders.Fuse(), decoders.Replace("hello", "bye")]
    )
    return tokenizer


KINDS: list[Callable[[], tokenizers.Tokenizer]] = [
    byte_level_tokenizer,
    byte_level_with_additions,
    byte_level_among_others,
    sentencepiece,
    metaspace,
    bare,
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_streamed_text_equals_decoding_all_tokens(kind: Callable[[], tokenizers.Tokenizer]) -> None:
    backend = kind()
    vocabulary = Vocabulary(backend)
    beyond = backend.get_vocab_size() + 3  # models have padded vocabularies

    @settings(max_examples=150)
    @given(st.lists(st.lists(st.integers(0, beyond), min_size=1, max_size=4), max_size=30))
    def holds(steps: list[list[int]]) -> None:
        detokenizer = vocabulary.create_detokenizer()
        streamed = [detokenizer.append_tokens(step) for step in steps]
        streamed.append(detokenizer.flush())
        everything = [token for step in steps for token in step]
        assert "".join(streamed) == backend.decode(everything, skip_special_tokens=True)

    holds()


class DecodeCountingBackend:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.decoded_tokens = self.longest_call_tokens = 0

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        self.decoded_tokens += len(tokens)
        self.longest_call_tokens = max(self.longest_call_tokens, len(tokens))
        return self._backend.decode(tokens, skip_special_tokens=skip_special_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


@pytest.mark.parametrize(
    "kind",
    [sentencepiece, metaspace, bare, byte_level_among_others],
    ids=lambda kind: kind.__name__,
)
def test_tokens_that_are_replacement_characters_are_decoded_once(
    kind: Callable[[], tokenizers.Tokenizer],
) -> None:
    """Such a token looks like one that ends in the middle of a character, and nothing that follows
    changes that."""
    backend = DecodeCountingBackend(kind())
    vocabulary = Vocabulary(cast(tokenizers.Tokenizer, backend))
    bad = kind().token_to_id("\ufffd") or byte_tokens(b"\x80")[0]
    detokenizer = vocabulary.create_detokenizer()
    backend.decoded_tokens = backend.longest_call_tokens = 0
    shown = [detokenizer.append_tokens([bad]) for _ in range(500)]
    assert all(shown)
    assert backend.decoded_tokens <= 2 * 500  # each behind one that is cut off again
    assert backend.longest_call_tokens <= 2
    assert "".join(shown) + detokenizer.flush() == kind().decode([bad] * 500)


@settings(max_examples=200)
@given(st.text(max_size=40))
def test_no_step_emits_a_partial_character(text: str) -> None:
    """Byte by byte, every prefix of what is shown is a prefix of the text."""
    detokenizer = Vocabulary(byte_level_tokenizer()).create_detokenizer()
    shown = ""
    for token in byte_tokens(text.encode()):
        shown += detokenizer.append_tokens([token])
        assert text.startswith(shown)
    assert shown + detokenizer.flush() == text


@settings(max_examples=200)
@given(st.binary(max_size=40))
def test_invalid_utf8_becomes_replacement_characters(data: bytes) -> None:
    backend = byte_level_tokenizer()
    detokenizer = Vocabulary(backend).create_detokenizer()
    tokens = byte_tokens(data)
    streamed = "".join(detokenizer.append_tokens([token]) for token in tokens) + detokenizer.flush()
    assert streamed == backend.decode(tokens) == data.decode(errors="replace")


def test_an_emoji_comes_whole() -> None:
    detokenizer = Vocabulary(byte_level_tokenizer()).create_detokenizer()
    assert [detokenizer.append_tokens([token]) for token in byte_tokens("a😀b".encode())] == [
        "a",
        "",
        "",
        "",
        "😀",
        "b",
    ]


def test_byte_fallback_waits_for_the_end_of_its_run() -> None:
    """One bad byte turns the whole run into replacements, so none of it may be shown before."""
    backend = sentencepiece()
    detokenizer = Vocabulary(backend).create_detokenizer()
    euro_then_bad = [token_id(backend, f"<0x{byte:02X}>") for byte in (0xE2, 0x82, 0xAC, 0xFF)]
    assert [detokenizer.append_tokens([token]) for token in euro_then_bad] == [""] * 4
    assert detokenizer.append_tokens([token_id(backend, "a")]) == "\ufffd" * 4 + "a"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_continuation_equals_the_text_it_adds(kind: Callable[[], tokenizers.Tokenizer]) -> None:
    """As in Llama 2, where a decoding loses the space that its first word brings."""
    backend = kind()
    vocabulary = Vocabulary(backend)
    words = (
        token
        for token in range(backend.get_vocab_size())
        if "<0x" not in (backend.id_to_token(token) or "")
    )
    before = next(token for token in words if backend.decode([token]).strip().isalnum())

    @settings(max_examples=80)
    @given(st.lists(st.integers(0, backend.get_vocab_size() - 1), max_size=12))
    def holds(tokens: list[int]) -> None:
        detokenizer = vocabulary.create_detokenizer(is_continuation=True)
        added = (
            "".join(detokenizer.append_tokens([token]) for token in tokens) + detokenizer.flush()
        )
        alone = backend.decode([before], skip_special_tokens=True)
        assert alone + added == backend.decode([before, *tokens], skip_special_tokens=True)

    holds()


def test_continuing_word_keeps_its_leading_space() -> None:
    backend = sentencepiece()
    word = [token_id(backend, "▁hello")]
    assert Vocabulary(backend).create_detokenizer().append_tokens(word) == "hello"
    assert (
        Vocabulary(backend).create_detokenizer(is_continuation=True).append_tokens(word) == " hello"
    )


NAMES = [
    (byte_level_tokenizer, "Ġ", " "),
    (sentencepiece, "▁hello", " hello"),
    (sentencepiece, "<0x0A>", "\n"),
]
NAMES += [
    (sentencepiece, "<0xE2>", "bytes:\\xe2"),
    (byte_level_tokenizer, EOS_TOKEN, EOS_TOKEN),
    (byte_level_tokenizer, "Ã", "bytes:\\xc3"),
]


@pytest.mark.parametrize(("kind", "piece", "text"), NAMES)
def test_token_text(kind: Callable[[], tokenizers.Tokenizer], piece: str, text: str) -> None:
    vocabulary = Vocabulary(kind())
    assert vocabulary.token_text(token_id(kind(), piece)) == text
    assert vocabulary.token_text(100_000) is None


def test_special_tokens_leave_no_text() -> None:
    detokenizer = Vocabulary(byte_level_tokenizer()).create_detokenizer()
    end = token_id(byte_level_tokenizer(), EOS_TOKEN)
    assert (
        detokenizer.append_tokens([end, *byte_level_tokenizer().encode("hello").ids, end])
        == "hello"
    )


@pytest.mark.parametrize("kind", [byte_level_tokenizer, metaspace])
def test_special_tokens_that_are_shown_are_text(
    kind: Callable[[], tokenizers.Tokenizer],
) -> None:
    backend = tokenizers.Tokenizer.from_str(kind().to_str())
    backend.add_special_tokens(["[TOOL_CALLS]", "[HIDDEN]"])
    tokens = backend.encode("hello[TOOL_CALLS][HIDDEN]hello", add_special_tokens=False).ids
    detokenizer = Vocabulary(backend).create_detokenizer(
        shown_special=frozenset({"[TOOL_CALLS]", "unknown"})
    )
    text = "".join(detokenizer.append_tokens((token,)) for token in tokens) + detokenizer.flush()
    assert text.replace(" ", "") == "hello[TOOL_CALLS]hello"
