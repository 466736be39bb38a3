"""Decodes tokens to text incrementally, at a cost per token that does not grow with the output.

However the tokens are cut into steps, the texts of all `append_tokens` calls and of the final
`flush` concatenate to the tokenizer's own decoding of all tokens without special ones; for tokens
that continue a text, to what they add to its decoding. No step emits an incomplete character.

Stop strings are found across token boundaries, with one Knuth-Morris-Pratt automaton for each. The
result does not depend on how the text is cut into steps: it is the match that ends first, and of
those that end together, the longest.
"""

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import tokenizers
from tokenizers.decoders import ByteLevel

from coordinator.text.byte_alphabet import CHAR_TO_BYTE

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>$")
_METASPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece spells a space


class IncrementalDetokenizer(Protocol):
    def append_tokens(self, tokens: Iterable[int]) -> str:
        """Return the text that these tokens complete; may be empty."""
        ...

    def flush(self) -> str:
        """Return what is left at the end: the replacement of an incomplete character, if any."""
        ...


class Vocabulary:
    """The vocabulary of one tokenizer, shared by its detokenizers, with cached lookups."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend
        self.is_byte_level = isinstance(backend.decoder, ByteLevel)
        self.has_byte_pieces = _has_byte_level_step(backend.decoder)
        self._special = {
            token for token, added in backend.get_added_tokens_decoder().items() if added.special
        }
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        self._anchor = self._find_anchor()

    def create_detokenizer(
        self, *, is_continuation: bool = False, shown_special: frozenset[str] = frozenset()
    ) -> IncrementalDetokenizer:
        """`shown_special` are the special tokens whose names are part of the text."""
        detokenizer = (
            _ByteLevelDetokenizer(self)
            if self.is_byte_level
            else _BufferedDetokenizer(self, is_continuation)
        )
        shown = {
            token: name
            for name in shown_special
            if (token := self.backend.token_to_id(name)) in self._special
        }
        return _SpecialTokenDetokenizer(detokenizer, shown) if shown else detokenizer

    def visible_piece(self, token: int) -> str | None:
        """Return the piece of a token, or None for special and unknown tokens."""
        return None if token in self._special else self.backend.id_to_token(token)

    def piece_bytes(self, token: int) -> bytes:
        """Return the bytes that a byte-level token stands for."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = _piece_to_bytes(self.visible_piece(token) or "")
        return known

    def token_bytes(self, token: int) -> bytes | None:
        """Return what a token stands for inside a text, or None if it is unknown.

        A special token stands for its name.
        """
        piece = self.backend.id_to_token(token)
        if piece is None or token in self._special:
            return None if piece is None else piece.encode()
        if self.is_byte_level:
            return self.piece_bytes(token)
        return (
            bytes([int(piece[3:5], 16)])
            if _BYTE_TOKEN.match(piece)
            else piece.replace(_METASPACE, " ").encode()
        )

    def token_text(self, token: int) -> str | None:
        """Return `token_bytes` as text; an incomplete character as `bytes:` and escapes."""
        if token not in self._texts:
            self._texts[token] = self._compute_token_text(token)
        return self._texts[token]

    def _compute_token_text(self, token: int) -> str | None:
        data = self.token_bytes(token)
        try:
            return None if data is None else data.decode()
        except UnicodeDecodeError as error:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in error.object)

    def decode_continuation(self, tokens: list[int]) -> str:
        """Decode tokens that follow others.

        Decoders treat the start of a text differently (Llama 2's drops a space), so these tokens
        are decoded after a fixed token, whose own text is removed again.
        """
        anchor, text = self._anchor
        return self.backend.decode([anchor, *tokens], skip_special_tokens=True)[len(text) :]

    def _find_anchor(self) -> tuple[int, str]:
        for token in range(self.backend.get_vocab_size()):
            text = self.backend.decode([token], skip_special_tokens=True)
            if (
                text.isascii()
                and text.isalnum()
                and not _BYTE_TOKEN.match(self.backend.id_to_token(token) or "")
            ):
                return token, text
        return 0, ""


class _ByteLevelDetokenizer:
    """For byte-level BPE (GPT-2, Llama 3, Qwen): a table of bytes and an incremental UTF-8
    decoder."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def append_tokens(self, tokens: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(map(self._vocabulary.piece_bytes, tokens)))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _BufferedDetokenizer:
    """For any other decoder: tokens are held until they end a character, then decoded together,
    each once.

    Byte-fallback tokens are held to the end of their run, because one bad byte turns the whole run
    into replacements. Where pieces are bytes among other steps of decoding, a piece may end in the
    middle of a character: then it is held until the next few have completed it, or have shown that
    they cannot. Any other piece is whole, also the one that is the replacement character itself.
    """

    def __init__(self, vocabulary: Vocabulary, begun: bool) -> None:
        self._vocabulary = vocabulary
        self._pending_tokens: list[int] = []
        self._has_output = begun
        self._utf8 = (
            codecs.getincrementaldecoder("utf-8")("replace") if vocabulary.has_byte_pieces else None
        )

    def append_tokens(self, tokens: Iterable[int]) -> str:
        return "".join(self._append_token(token) for token in tokens)

    def _append_token(self, token: int) -> str:
        piece = self._vocabulary.visible_piece(token)
        if piece is None:
            return ""
        self._pending_tokens.append(token)
        if _BYTE_TOKEN.match(piece) or self._ends_inside_character(token):
            return ""
        return self._flush_pending()

    def _ends_inside_character(self, token: int) -> bool:
        if self._utf8 is None:
            return False
        self._utf8.decode(self._vocabulary.piece_bytes(token))
        return bool(self._utf8.getstate()[0])

    def flush(self) -> str:
        return self._flush_pending() if self._pending_tokens else ""

    def _decode_pending(self) -> str:
        if self._has_output:
            return self._vocabulary.decode_continuation(self._pending_tokens)
        return self._vocabulary.backend.decode(self._pending_tokens, skip_special_tokens=True)

    def _flush_pending(self) -> str:
        text = self._decode_pending()
        self._pending_tokens.clear()
        self._has_output = True
        return text


class _SpecialTokenDetokenizer:
    """Adds the names of some special tokens to the text of another detokenizer."""

    def __init__(self, others: IncrementalDetokenizer, shown: Mapping[int, str]) -> None:
        """`others` decodes the tokens that `shown` does not have."""
        self._others = others
        self._shown = shown

    def append_tokens(self, tokens: Iterable[int]) -> str:
        return "".join(map(self._append_token, tokens))

    def _append_token(self, token: int) -> str:
        name = self._shown.get(token)
        return self._others.append_tokens((token,)) if name is None else self.flush() + name

    def flush(self) -> str:
        return self._others.flush()


def _has_byte_level_step(decoder: Any) -> bool:
    """Whether byte-level pieces are turned into text as one step of several."""
    if decoder is None:
        return False
    steps = json.loads(decoder.__getstate__()).get("decoders", ())
    return any(step["type"] == "ByteLevel" for step in steps)


def _piece_to_bytes(piece: str) -> bytes:
    """A piece with a character that is no stand-in (an added token with a space, say) is its own
    UTF-8."""
    try:
        return bytes(CHAR_TO_BYTE[char] for char in piece)
    except KeyError:
        return piece.encode()


class StopStringMatcher:
    """Searches a text for several stop strings, fed piece by piece."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._automata = [_KmpAutomaton(string) for string in strings]
        self._fed_characters = 0
        # How many of the last characters may be the beginning of a stop string: not to be emitted.
        self.held_characters = 0
        self.matched_string: str | None = None  # the longest stop string that became complete

    def skip_characters(self, characters: int) -> None:
        """Advance the position without searching."""
        self._fed_characters += characters

    def feed_text(self, text: str) -> int | None:
        """Return where a stop string begins that is now complete, or None.

        The position counts all characters fed and skipped.
        """
        for character in text:
            self._fed_characters += 1
            complete = [
                automaton.string
                for automaton in self._automata
                if automaton.feed_character(character)
            ]
            if complete:
                self.held_characters = 0
                self.matched_string = max(complete, key=len)
                return self._fed_characters - len(self.matched_string)
        self.held_characters = max(
            (automaton.matched_length for automaton in self._automata), default=0
        )
        return None


class _KmpAutomaton:
    """Matches one string. Knuth, Morris, Pratt: Fast Pattern Matching in Strings (1977)."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.matched_length = 0  # length of the longest prefix of the string that ends the text
        self._fallback = _prefix_function(string)

    def feed_character(self, character: str) -> bool:
        matched = self.matched_length
        while matched and self.string[matched] != character:
            matched = self._fallback[matched]
        self.matched_length = matched + (self.string[matched] == character)
        return self.matched_length == len(self.string)


def _prefix_function(string: str) -> list[int]:
    """For each prefix length, the length of its longest proper prefix that is also its suffix."""
    borders = [0, 0]
    length = 0
    for character in string[1:]:
        while length and string[length] != character:
            length = borders[length]
        length += string[length] == character
        borders.append(length)
    return borders
