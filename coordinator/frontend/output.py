"""What the client is shown of one choice: its events turned into pieces of text with the tokens
that they belong to.

However the tokens are cut into events, the texts of all pieces concatenate to the same text, and
their tokens to the same tokens.
"""

from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from baton.types import FinishReason, TokenLogprobs
from coordinator.generation import TokensEvent
from coordinator.text.detokenizer import IncrementalDetokenizer
from coordinator.text.stop_strings import StopStringMatcher

# tokens of a scored prompt in one piece: each may name 20 others, which takes time and bytes to
# word
ECHO_CHUNK_TOKENS = 256


class OutputChunk(msgspec.Struct, frozen=True, gc=False):
    """New text of a choice and its new tokens. With scores, each token has one (the first of a
    prompt has None) and `text_offsets`, the place in the choice's whole text where its own begins.
    `is_prompt_echo` marks the prompt or a part of it, given back."""

    choice_index: int
    text: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs | None] = ()
    text_offsets: Sequence[int] = ()
    finish_reason: FinishReason | None = None
    is_prompt_echo: bool = False


class OutputProcessor:
    """One choice. With stop strings, a token is listed once a character of it, or of a later one,
    is shown: text that may begin a stop string is held back, and the tokens with it."""

    def __init__(
        self,
        index: int,
        detokenizer: IncrementalDetokenizer,
        *,
        stop: Sequence[str] = (),
        scored: bool = False,
        unsearched: int = 0,
    ) -> None:
        """`unsearched` so many first tokens are never part of a stop string (min_tokens)."""
        self.choice_index = index
        self.output_tokens = 0  # up to the one that completed a stop string
        self.is_stopped = False
        self._detokenizer = detokenizer
        self._stop_matcher = StopStringMatcher(stop) if stop else None
        self.is_passthrough = (
            self._stop_matcher is None and not scored
        )  # then each step is one piece
        self._min_tokens = unsearched
        self._received_characters = self._emitted_characters = 0  # characters
        self._held_text = ""
        self._held_tokens: deque[tuple[int, TokenLogprobs | None, int]] = (
            deque()
        )  # token, its score, where its text starts

    def echo_prompt(
        self,
        text: str,
        tokens: Sequence[int],
        scores: Sequence[TokenLogprobs | None],
        starts: Sequence[int],
    ) -> Iterator[OutputChunk]:
        """The prompt, before anything else is told; with scores, at most `ECHO_CHUNK_TOKENS` tokens
        of it at once."""
        self._received_characters = self._emitted_characters = len(text)
        if self._stop_matcher is not None:
            self._stop_matcher.skip_characters(len(text))
        step = ECHO_CHUNK_TOKENS if scores else len(tokens)
        for begin in range(0, len(tokens), step):
            end = begin + step
            first, last = (
                starts[begin] if begin else 0,
                starts[end] if end < len(tokens) else len(text),
            )
            part = slice(begin, end)
            yield OutputChunk(
                self.choice_index,
                text[first:last],
                tokens[part],
                scores[part],
                starts[part],
                is_prompt_echo=True,
            )

    def process_tokens(self, delta: TokensEvent) -> OutputChunk | None:
        """What a step brings to be shown, None if all of it is held back. After it, `is_stopped`
        tells whether a stop string is complete: then nothing more is shown."""
        if self.is_passthrough:
            return self.process_passthrough(delta)
        if self.is_stopped:
            return None
        scores = delta.logprobs or (None,) * len(delta.token_ids)
        for token, score in zip(delta.token_ids, scores, strict=True):
            self.output_tokens += 1
            self._held_tokens.append((token, score, self._received_characters))
            if self._append_text(self._detokenizer.append_tokens((token,))):
                break
        return self._emit_chunk(bool(delta.logprobs))

    def process_passthrough(self, delta: TokensEvent) -> OutputChunk:
        """`process_tokens`, where it is `is_passthrough`."""
        tokens = delta.token_ids
        self.output_tokens += len(tokens)
        return OutputChunk(self.choice_index, self._detokenizer.append_tokens(tokens), tokens)

    def flush(self) -> OutputChunk | None:
        """What is left to show at the end of the generation: what was held back, and an unfinished
        character."""
        if self.is_stopped:
            return None
        scored = bool(self._held_tokens) and self._held_tokens[0][1] is not None
        if not self._append_text(self._detokenizer.flush()):
            self._stop_matcher = None
        return self._emit_chunk(scored)

    def _append_text(self, text: str) -> bool:
        """True once a stop string is complete; the text from there on is dropped."""
        self._received_characters += len(text)
        self._held_text += text
        if self._stop_matcher is None:
            return False
        if self.output_tokens <= self._min_tokens:
            self._stop_matcher.skip_characters(len(text))
            return False
        begin = self._stop_matcher.feed_text(text)
        if begin is None:
            return False
        self._held_text = self._held_text[: begin - self._emitted_characters]
        self._received_characters = begin
        self.is_stopped = True
        return True

    def _emit_chunk(self, scored: bool) -> OutputChunk | None:
        end = self._received_characters - (
            self._stop_matcher.held_characters if self._stop_matcher else 0
        )
        text, self._held_text = (
            self._held_text[: end - self._emitted_characters],
            self._held_text[end - self._emitted_characters :],
        )
        self._emitted_characters = end
        told: list[tuple[int, TokenLogprobs | None, int]] = []
        while self._held_tokens and (self._stop_matcher is None or self._held_tokens[0][2] < end):
            told.append(self._held_tokens.popleft())
        if not (text or told):
            return None
        tokens, scores, starts = zip(*told, strict=True) if told else ((), (), ())
        return OutputChunk(
            self.choice_index, text, tokens, scores if scored else (), starts if scored else ()
        )
