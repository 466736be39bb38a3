"""Encodes text with the bound on its tokens checked before and during the work.

`encode_batch_fast` of `tokenizers` releases Python's lock while it works, unlike `encode`, but its
result is freed under the lock. So a text that could be far too long is first encoded in slices,
until they have more than twice the allowed tokens. A cut changes only the tokens next to it, so
such a text is too long however it is cut.
"""

import json
from collections.abc import Iterator
from typing import Any

import tokenizers

from baton.limits import TextLimit
from coordinator.text.byte_alphabet import CHAR_TO_BYTE

SLICE_CHARS = 64 << 10
ALWAYS_SMALL_BYTES = 256 << 10  # the tokens of so much text are freed within milliseconds
_NFC_SHRINK_FACTOR = 3  # NFC makes a text at most so many times shorter, in bytes
# Pre-tokenizers that drop no text (Split only if it removes nothing).
_LOSSLESS_PRE_TOKENIZERS = {"Split", "ByteLevel", "Digits"}


class BoundedEncoder:
    """Encodes with one tokenizer. Thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._longest_token_bytes = longest_token_bytes(backend)

    def check_byte_size(self, size: int, limit: TextLimit) -> None:
        """Raises ContextLengthExceeded if no encoding of a text of `size` bytes can fit."""
        limit.check_byte_count(size, self._longest_token_bytes)

    def encode_text(self, text: str, limit: TextLimit, *, add_special_tokens: bool) -> list[int]:
        """Encode a text. Raises ContextLengthExceeded if it has over twice the allowed tokens.

        The caller checks the exact limit.
        """
        if 4 * len(text) > max(2 * limit.max_tokens, ALWAYS_SMALL_BYTES):
            self._check_in_slices(text, limit)
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def encode_texts(self, texts: list[str], limit: TextLimit) -> Iterator[list[int]]:
        """Encode each text by itself, without special tokens. Raises as `encode_text`."""
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
    """Return the size of a text in UTF-8, in bytes."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def longest_token_bytes(backend: tokenizers.Tokenizer) -> int | None:
    """Return the most bytes of text that one token stands for, or None without a known bound.

    There is none if the tokenizer drops text, or has one token for any unknown word.
    """
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
    """Return a part of a tokenizer as its file has it, or None."""
    return None if part is None else json.loads(part.__getstate__())


def _normalizer_shrink_factor(normalizer: Any) -> int | None:
    """Return by what factor a normalizer may shorten a text, or None if that is unknown."""
    if normalizer is None:
        return 1
    return _NFC_SHRINK_FACTOR if normalizer["type"] == "NFC" else None


def _is_byte_level(pre_tokenizer: Any) -> bool:
    """Whether a token represents every byte of a text."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    kinds = {step and step["type"] for step in steps}
    removes = any(step and step.get("behavior", "Isolated") != "Isolated" for step in steps)
    return "ByteLevel" in kinds and kinds <= _LOSSLESS_PRE_TOKENIZERS and not removes
