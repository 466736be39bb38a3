"""Encodes special tokens that messages spell out as plain text, so that they cannot forge turns.

A tokenizer recognises its special tokens wherever they are spelled. Those that the chat template
writes must be recognised, and those in messages must not. So each special token in a message is
replaced by a placeholder before the template runs. The rendered text is then encoded in pieces: the
text between placeholders as usual, and a placeholder as the plain text of its token. A conversation
without such tokens is encoded in one piece.

This does not cover templates whose turn markers are plain words instead of special tokens.

A message can be as long as a body, so no step here takes longer than one pass over it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol

import tokenizers

from baton.errors import InvalidRequest
from baton.limits import TextLimit
from coordinator.text.chat_template import ChatPrompt

_PLACEHOLDER_RANGE = range(0xF0000, 0xFFFFE)  # private-use characters, which no template writes
_FIRST_PLACEHOLDER = chr(_PLACEHOLDER_RANGE[0])
Placeholders = Mapping[str, str]  # placeholder to special token
SLICE_CHARS = 64 << 10  # of a long text, looked at together


class TextEncoder(Protocol):
    """Tokenizes texts. Raises ContextLengthExceeded for more tokens than `limit` has."""

    def check_size(self, text: str, limit: TextLimit) -> int: ...

    def encode_text(
        self, text: str, limit: TextLimit, *, add_special_tokens: bool
    ) -> list[int]: ...

    def encode_texts(self, texts: list[str], limit: TextLimit) -> Iterator[list[int]]: ...


class SpecialTokenEscaper:
    """Escapes the special tokens of one tokenizer. Immutable, so thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer, encoder: TextEncoder) -> None:
        special = [
            token.content for token in backend.get_added_tokens_decoder().values() if token.special
        ]
        self._special = sorted(special, key=len, reverse=True)  # the longest match counts
        self._encoder = encoder
        backend.encode_special_tokens = True  # as plain text; the backend is not shared yet
        self._plain_encodings = {
            content: backend.encode(content, add_special_tokens=False) for content in special
        }
        backend.encode_special_tokens = False
        self._surrounding_tokens = _find_surrounding_tokens(backend)

    def escape_chat(self, conversation: ChatPrompt) -> tuple[ChatPrompt, Placeholders]:
        """Replace the special tokens that a conversation spells by placeholders.

        Raises InvalidRequest when every possible placeholder occurs in the conversation.
        """
        texts = list(_chat_texts(conversation))
        spelled = [content for content in self._special if any(content in text for text in texts)]
        if not spelled:
            return conversation, {}
        used = _find_placeholders(texts)
        marks = dict(
            zip(
                spelled,
                (mark for mark in map(chr, _PLACEHOLDER_RANGE) if mark not in used),
                strict=False,
            )
        )
        if len(marks) < len(spelled):
            raise InvalidRequest(
                "messages contain special tokens and every character that could replace them",
                param="messages",
            )
        return _escape_texts(conversation, marks), {
            mark: content for content, mark in marks.items()
        }

    def encode_escaped(
        self, rendered: str, marks: Placeholders, limit: TextLimit, *, add_special_tokens: bool
    ) -> list[int]:
        """Encode a text with placeholders. Raises ContextLengthExceeded as early as possible."""
        self._encoder.check_size(rendered, limit)
        if not marks:
            return self._encoder.encode_text(rendered, limit, add_special_tokens=add_special_tokens)
        spelled = sum(rendered.count(mark) for mark in marks)
        if spelled > limit.max_tokens:  # each is at least one token
            raise limit.length_exceeded_error(limit.max_tokens, "more than ")
        pieces = re.split(f"([{''.join(marks)}])", rendered)
        between = self._encoder.encode_texts(
            [piece for piece in pieces if piece and piece not in marks], limit
        )
        inner = chain.from_iterable(
            self._plain_encodings[marks[piece]].ids if piece in marks else next(between)
            for piece in pieces
            if piece
        )
        before, after = self._surrounding_tokens if add_special_tokens else ((), ())
        return [*before, *inner, *after]


def _find_surrounding_tokens(
    backend: tokenizers.Tokenizer,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the special tokens that are added before and after a text."""
    alone, within = (
        backend.encode("a", add_special_tokens=special).ids for special in (False, True)
    )
    for place in range(len(within) - len(alone) + 1):
        if within[place : place + len(alone)] == alone:
            return tuple(within[:place]), tuple(within[place + len(alone) :])
    return (), ()


def _escape_texts(conversation: ChatPrompt, marks: Mapping[str, str]) -> ChatPrompt:
    def escape_in(value: object) -> Any:
        if isinstance(value, str):
            return _escape_text(value, marks)
        if isinstance(value, Mapping):
            return {escape_in(name): escape_in(inner) for name, inner in value.items()}
        return [escape_in(item) for item in value] if isinstance(value, list) else value

    return replace(
        conversation,
        messages=[escape_in(message) for message in conversation.messages],
        tools=[escape_in(tool) for tool in conversation.tools],
        template_kwargs=escape_in(conversation.template_kwargs),
    )


def _escape_text(text: str, marks: Mapping[str, str]) -> str:
    """`marks` is ordered by the length of the special tokens, longest first."""
    for content, mark in marks.items():
        text = text.replace(content, mark)
    return text


def _find_placeholders(texts: list[str]) -> set[str]:
    """Return the private-use characters in the texts."""
    found = set[str]()
    for text in texts:
        for begin in range(0, len(text), SLICE_CHARS):
            found.update(
                char
                for char in set(text[begin : begin + SLICE_CHARS])
                if char >= _FIRST_PLACEHOLDER
            )
    return found


def _chat_texts(conversation: ChatPrompt) -> Iterator[str]:
    for value in (*conversation.messages, *conversation.tools, conversation.template_kwargs):
        yield from _inner_texts(value)


def _inner_texts(value: object) -> Iterator[str]:
    """Yield all texts in a value, also the names in objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield name
            yield from _inner_texts(inner)
    elif isinstance(value, list):
        for item in value:
            yield from _inner_texts(item)
