"""Encoding with its bound checked before the work, and during it.

`encode_batch_fast` of `tokenizers` leaves Python's lock free while it works, where `encode` holds
it; but what it made is freed under the lock. So a text that could be far too long is first encoded
in slices, until they have twice as many tokens as may be: a cut changes the tokens beside it and no
others, so such a text is too long however it is cut.
"""

import json
from collections.abc import Iterator
from typing import Any

import tokenizers

from baton.limits import TextLimit
from coordinator.text.byte_alphabet import CHAR_TO_BYTE

SLICE_CHARS = 64 << 10  # characters
ALWAYS_SMALL_BYTES = (
    256 << 10
)  # bytes: the tokens of so much text are freed within a few milliseconds
_NFC_SHRINK_FACTOR = 3  # times at most, in bytes
_LOSSLESS_PRE_TOKENIZERS = {
    "Split",
    "ByteLevel",
    "Digits",
}  # pre-tokenizers that drop nothing, if Split removes nothing


class BoundedEncoder:
    """Of one tokenizer. Threads may share it."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._longest_token_bytes = longest_token_bytes(backend)

    def check_byte_size(self, size: int, limit: TextLimit) -> None:
        """Raises TooLong for a text of `size` bytes that no tokenizing can make fit. Costs
        nothing."""
        limit.check_byte_count(size, self._longest_token_bytes)

    def encode_text(self, text: str, limit: TextLimit, *, add_special_tokens: bool) -> list[int]:
        """Raises TooLong for a text of more than twice the limit; what is a little over it, the
        caller will see."""
        if 4 * len(text) > max(2 * limit.max_tokens, ALWAYS_SMALL_BYTES):
            self._check_in_slices(text, limit)
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def encode_texts(self, texts: list[str], limit: TextLimit) -> Iterator[list[int]]:
        """Of each text by itself, without the special tokens around it. Raises TooLong likewise."""
        for text in texts:
            if 4 * len(text) > max(2 * limit.max_tokens, ALWAYS_SMALL_BYTES):
                self._check_in_slices(text, limit)
        for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False):
            yield encoding.ids

    def _check_in_slices(self, text: str, limit: TextLimit) -> None:
        tokens = 0
        for begin in range(0, len(text), SLICE_CHARS):
            (encoding,) = self._backend.encode_batch_fast(
                [text[begin : begin + SLICE_CHARS]], add_special_tokens=False
            )
            tokens += len(encoding)
            if tokens > 2 * limit.max_tokens + begin // SLICE_CHARS:
                raise limit.length_exceeded_error(limit.max_tokens, "more than ")


def utf8_size(text: str) -> int:
    """Bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def longest_token_bytes(backend: tokenizers.Tokenizer) -> int | None:
    """The most bytes of text that one token stands for; None if that is not known to have a bound,
    as where a tokenizer drops text, or has one token for any word that it does not know."""
    parts: dict[str, Any] = {
        name: _part_settings(getattr(backend, name)) for name in ("normalizer", "pre_tokenizer")
    }
    shrinks = _normalizer_shrink_factor(parts["normalizer"])
    vocabulary, added = (
        backend.get_vocab(with_added_tokens=False),
        backend.get_added_tokens_decoder().values(),
    )
    if (
        shrinks is None
        or not _is_byte_level(parts["pre_tokenizer"])
        or not vocabulary.keys() >= CHAR_TO_BYTE.keys()
        or any(token.lstrip or token.rstrip for token in added)
    ):
        return None
    return shrinks * max(
        *map(len, vocabulary), *(utf8_size(token.content) for token in added), 1, 1
    )


def _part_settings(part: Any) -> Any:
    """A part of a tokenizer as its file has it; None if there is none."""
    return None if part is None else json.loads(part.__getstate__())


def _normalizer_shrink_factor(normalizer: Any) -> int | None:
    """By how many times a normalizer may shorten a text, None if nobody knows."""
    if normalizer is None:
        return 1
    return _NFC_SHRINK_FACTOR if normalizer["type"] == "NFC" else None


def _is_byte_level(pre_tokenizer: Any) -> bool:
    """Whether every byte of a text ends up in a token."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    kinds = {step and step["type"] for step in steps}
    removes = any(step and step.get("behavior", "Isolated") != "Isolated" for step in steps)
    return "ByteLevel" in kinds and kinds <= _LOSSLESS_PRE_TOKENIZERS and not removes
