"""Special tokens that the words of a conversation spell: text like any other, not what ends a turn or begins one.

A tokenizer recognises its special tokens wherever they are spelled, so a message could forge the turns of others. What
a template writes itself must be recognised, what a message says must not. So every special token in a message is
replaced by a mark before the template runs, and the rendered text is encoded in pieces: what lies between marks as
usual, and for a mark the tokens of its spelling. A conversation that spells none is encoded as ever, in one piece.

Turn marks that are no special tokens of the tokenizer, plain words of the template, are beyond this.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import tokenizers

from baton.errors import InvalidRequest
from coordinator.chat_template import Conversation

_MARKS = range(0xF0000, 0xFFFFE)  # characters for private use: no template writes any
Marks = Mapping[str, str]  # a mark to the special token that it stands for


class SpelledTokens:
    """Of one tokenizer. Immutable once made, so threads may share it."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
        special.sort(key=len, reverse=True)  # the longest that fits counts
        self._pattern = re.compile("|".join(map(re.escape, special))) if special else None
        backend.encode_special_tokens = True  # recognises none, while it is ours alone
        self._plain = {content: backend.encode(content, add_special_tokens=False) for content in special}
        backend.encode_special_tokens = False

    def hide(self, conversation: Conversation) -> tuple[Conversation, Marks]:
        """The conversation with marks for the special tokens that it spells. Raises InvalidRequest when it leaves no
        character for a mark."""
        if self._pattern is None:
            return conversation, {}
        texts = list(_texts(conversation))
        spelled = {match[0] for text in texts for match in self._pattern.finditer(text)}
        if not spelled:
            return conversation, {}
        used = set().union(*texts)
        marks = dict(zip(spelled, (mark for mark in map(chr, _MARKS) if mark not in used), strict=False))
        if len(marks) < len(spelled):
            raise InvalidRequest(
                "messages spell special tokens and have every character that could stand for those", param="messages"
            )
        return self._marked(conversation, marks), {mark: content for content, mark in marks.items()}

    def _marked(self, conversation: Conversation, marks: Mapping[str, str]) -> Conversation:
        def marked(words: Mapping[str, object]) -> dict[str, object]:
            assert self._pattern is not None
            return {
                name: self._pattern.sub(lambda match: marks[match[0]], value) if isinstance(value, str) else value
                for name, value in words.items()
            }

        return replace(
            conversation,
            messages=[marked(message) for message in conversation.messages],
            arguments=marked(conversation.arguments),
        )

    def encode(
        self, backend: tokenizers.Tokenizer, rendered: str, marks: Marks, *, special: bool
    ) -> tokenizers.Encoding:
        """A text with marks, as `backend.encode` would one without."""
        if not marks:
            return backend.encode(rendered, add_special_tokens=special)
        pieces = re.split(f"([{''.join(marks)}])", rendered)
        encodings = [
            self._plain[marks[piece]] if piece in marks else backend.encode(piece, add_special_tokens=False)
            for piece in pieces
            if piece
        ]
        return backend.post_process(tokenizers.Encoding.merge(encodings), None, special)


def _texts(conversation: Conversation) -> Iterator[str]:
    for words in (*conversation.messages, conversation.arguments):
        yield from (value for value in words.values() if isinstance(value, str))
