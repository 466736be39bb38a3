"""What the client is shown of one choice: its events turned into pieces of text with the tokens that they belong to.

However the tokens are cut into events, the texts of all pieces concatenate to the same text, and their tokens to the
same tokens.
"""

from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from baton.types import FinishReason, TokenScore
from coordinator.detokenizer import Detokenizer
from coordinator.generation import Delta
from coordinator.stop_strings import StopStrings

ECHO_STEP = 256  # tokens of a scored prompt in one piece: each may name 20 others, which takes time and bytes to word


class Piece(msgspec.Struct, frozen=True, gc=False):
    """New text of a choice and its new tokens. With scores, each token has one (the first of a prompt has None) and
    `starts`, the place in the choice's whole text where its own begins. `echo` marks the prompt or a part of it, given
    back."""

    index: int
    text: str
    tokens: Sequence[int] = ()
    scores: Sequence[TokenScore | None] = ()
    starts: Sequence[int] = ()
    finish: FinishReason | None = None
    echo: bool = False


class Teller:
    """One choice. With stop strings, a token is listed once a character of it, or of a later one, is shown: text that
    may begin a stop string is held back, and the tokens with it."""

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        *,
        stop: Sequence[str] = (),
        scored: bool = False,
        unsearched: int = 0,
    ) -> None:
        """`unsearched` so many first tokens are never part of a stop string (min_tokens)."""
        self.index = index
        self.tokens = 0  # up to the one that completed a stop string
        self.stopped = False
        self._detokenizer = detokenizer
        self._stop = StopStrings(stop) if stop else None
        self.plain = self._stop is None and not scored  # then each step is one piece
        self._unsearched = unsearched
        self._received = self._shown = 0  # characters
        self._unshown = ""
        self._waiting: deque[tuple[int, TokenScore | None, int]] = deque()  # token, its score, where its text starts

    def echo(
        self, text: str, tokens: Sequence[int], scores: Sequence[TokenScore | None], starts: Sequence[int]
    ) -> Iterator[Piece]:
        """The prompt, before anything else is told; with scores, at most `ECHO_STEP` tokens of it at once."""
        self._received = self._shown = len(text)
        if self._stop is not None:
            self._stop.skip(len(text))
        step = ECHO_STEP if scores else len(tokens)
        for begin in range(0, len(tokens), step):
            end = begin + step
            first, last = starts[begin] if begin else 0, starts[end] if end < len(tokens) else len(text)
            part = slice(begin, end)
            yield Piece(self.index, text[first:last], tokens[part], scores[part], starts[part], echo=True)

    def tell(self, delta: Delta) -> Piece | None:
        """What a step brings to be shown, None if all of it is held back. After it, `stopped` tells whether a stop
        string is complete: then nothing more is shown."""
        if self.plain:
            return self.whole(delta)
        if self.stopped:
            return None
        scores = delta.scores or (None,) * len(delta.tokens)
        for token, score in zip(delta.tokens, scores, strict=True):
            self.tokens += 1
            self._waiting.append((token, score, self._received))
            if self._hear(self._detokenizer.add((token,))):
                break
        return self._show(bool(delta.scores))

    def whole(self, delta: Delta) -> Piece:
        """`tell`, where it is `plain`."""
        tokens = delta.tokens
        self.tokens += len(tokens)
        return Piece(self.index, self._detokenizer.add(tokens), tokens)

    def rest(self) -> Piece | None:
        """What is left to show at the end of the generation: what was held back, and an unfinished character."""
        if self.stopped:
            return None
        scored = bool(self._waiting) and self._waiting[0][1] is not None
        if not self._hear(self._detokenizer.flush()):
            self._stop = None
        return self._show(scored)

    def _hear(self, text: str) -> bool:
        """True once a stop string is complete; the text from there on is dropped."""
        self._received += len(text)
        self._unshown += text
        if self._stop is None:
            return False
        if self.tokens <= self._unsearched:
            self._stop.skip(len(text))
            return False
        begin = self._stop.add(text)
        if begin is None:
            return False
        self._unshown = self._unshown[: begin - self._shown]
        self._received = begin
        self.stopped = True
        return True

    def _show(self, scored: bool) -> Piece | None:
        end = self._received - (self._stop.held if self._stop else 0)
        text, self._unshown = self._unshown[: end - self._shown], self._unshown[end - self._shown :]
        self._shown = end
        told: list[tuple[int, TokenScore | None, int]] = []
        while self._waiting and (self._stop is None or self._waiting[0][2] < end):
            told.append(self._waiting.popleft())
        if not (text or told):
            return None
        tokens, scores, starts = zip(*told, strict=True) if told else ((), (), ())
        return Piece(self.index, text, tokens, scores if scored else (), starts if scored else ())
