"""Special tokens that the words of a conversation spell: text like any other, not what ends a turn
or begins one.

A tokenizer recognises its special tokens wherever they are spelled, so a message could forge the
turns of others. What a template writes itself must be recognised, what a message says must not. So
every special token in a message is replaced by a mark before the template runs, and the rendered
text is encoded in pieces: what lies between marks as usual, and for a mark the tokens of its
spelling. A conversation that spells none is encoded as ever, in one piece.

Turn marks that are no special tokens of the tokenizer, plain words of the template, are beyond
this.

A message can be as long as a body, so no single step here takes longer than to read it once.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain

import tokenizers

from baton.errors import InvalidRequest
from baton.limits import TextLimit
from coordinator.text.bounded_encoder import SLICE_CHARS, BoundedEncoder, utf8_size
from coordinator.text.chat_template import ChatPrompt

_PLACEHOLDER_RANGE = range(0xF0000, 0xFFFFE)  # characters for private use: no template writes any
_FIRST_PLACEHOLDER = chr(_PLACEHOLDER_RANGE[0])
Placeholders = Mapping[str, str]  # a mark to the special token that it stands for


class SpecialTokenEscaper:
    """Of one tokenizer. Immutable once made, so threads may share it."""

    def __init__(self, backend: tokenizers.Tokenizer, encoder: BoundedEncoder) -> None:
        special = [
            token.content for token in backend.get_added_tokens_decoder().values() if token.special
        ]
        self._special = sorted(special, key=len, reverse=True)  # the longest that fits counts
        self._encoder = encoder
        backend.encode_special_tokens = True  # recognises none, while it is ours alone
        self._plain_encodings = {
            content: backend.encode(content, add_special_tokens=False) for content in special
        }
        backend.encode_special_tokens = False
        self._surrounding_tokens = _find_surrounding_tokens(backend)

    def escape_chat(self, conversation: ChatPrompt) -> tuple[ChatPrompt, Placeholders]:
        """The conversation with marks for the special tokens that it spells. Raises InvalidRequest
        when it leaves no character for a mark."""
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
                "messages spell special tokens and have every character that could stand for those",
                param="messages",
            )
        return _escape_texts(conversation, marks), {
            mark: content for content, mark in marks.items()
        }

    def encode_escaped(
        self, rendered: str, marks: Placeholders, limit: TextLimit, *, add_special_tokens: bool
    ) -> list[int]:
        """The tokens of a text with marks, as of one without. Raises TooLong as soon as it is seen
        to be."""
        self._encoder.check_byte_size(utf8_size(rendered), limit)
        if not marks:
            return self._encoder.encode_text(rendered, limit, add_special_tokens=add_special_tokens)
        spelled = sum(rendered.count(mark) for mark in marks)
        if spelled > limit.max_tokens:  # each is a token at least
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
    """The tokens that belong before a text and after it."""
    alone, within = (
        backend.encode("a", add_special_tokens=special).ids for special in (False, True)
    )
    for place in range(len(within) - len(alone) + 1):
        if within[place : place + len(alone)] == alone:
            return tuple(within[:place]), tuple(within[place + len(alone) :])
    return (), ()


def _escape_texts(conversation: ChatPrompt, marks: Mapping[str, str]) -> ChatPrompt:
    def marked(words: Mapping[str, object]) -> dict[str, object]:
        return {
            name: _escape_text(value, marks) if isinstance(value, str) else value
            for name, value in words.items()
        }

    return replace(
        conversation,
        messages=[marked(message) for message in conversation.messages],
        template_kwargs=marked(conversation.template_kwargs),
    )


def _escape_text(text: str, marks: Mapping[str, str]) -> str:
    """`marks` has the longest first."""
    for content, mark in marks.items():
        text = text.replace(content, mark)
    return text


def _find_placeholders(texts: list[str]) -> set[str]:
    """The characters for private use that are there."""
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
    for words in (*conversation.messages, conversation.template_kwargs):
        yield from (value for value in words.values() if isinstance(value, str))
