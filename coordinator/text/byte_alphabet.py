"""Byte-level tokenizers: the characters that stand for bytes, and the longest token in bytes."""

import json
from typing import Any

import tokenizers


def _build_char_to_byte() -> dict[str, int]:
    """Build GPT-2's table: printable Latin-1 stands for itself, other bytes from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return table


CHAR_TO_BYTE = _build_char_to_byte()

_NFC_SHRINK_FACTOR = 3  # NFC makes a text at most so many times shorter, in bytes
# Pre-tokenizers that drop no text (Split only if it removes nothing).
_LOSSLESS_PRE_TOKENIZERS = {"Split", "ByteLevel", "Digits"}


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
        *map(len, vocabulary),
        *(len(token.content.encode(errors="surrogatepass")) for token in added),
        1,
        1,
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
