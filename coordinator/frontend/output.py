"""Turns the token events of one choice into chunks of text, up to a stop string.

However the tokens are cut into events, the texts of all chunks concatenate to the same text, and
their tokens to the same tokens.
"""

from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from baton.types import FinishReason, TokenLogprobs
from coordinator.generation import TokensEvent
from coordinator.text.detokenizer import IncrementalDetokenizer
from coordinator.text.stop_strings import StopStringMatcher

# Prompt tokens with logprobs in one chunk. Each may list 20 others, which are slow to encode.
ECHO_CHUNK_TOKENS = 256


class OutputChunk(msgspec.Struct, frozen=True, gc=False):
    """New text of a choice and its new tokens."""

    choice_index: int
    text: str
    token_ids: Sequence[int] = ()
    # If logprobs are requested, one for each token; None for the first token of a prompt.
    logprobs: Sequence[TokenLogprobs | None] = ()
    # With logprobs, where the text of each token begins in the choice's whole text, in characters.
    text_offsets: Sequence[int] = ()
    finish_reason: FinishReason | None = None  # set in the last chunk
    is_prompt_echo: bool = False  # the chunk repeats the prompt or a part of it (`echo`)


class OutputProcessor:
    """Detokenizes one choice and finds its stop strings.

    Text that may be the beginning of a stop string is held back, and its tokens with it: a token
    is emitted once a character of it, or of a later token, is.
    """

    def __init__(
        self,
        choice_index: int,
        detokenizer: IncrementalDetokenizer,
        *,
        stop: Sequence[str] = (),
        with_logprobs: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """The first `min_tokens` tokens are not searched for stop strings."""
        self.choice_index = choice_index
        self.output_tokens = 0  # up to the token that completed a stop string
        self.is_stopped = False
        self._detokenizer = detokenizer
        self._stop_matcher = StopStringMatcher(stop) if stop else None
        # Without stop strings and logprobs, each event becomes one chunk at once.
        self.is_passthrough = self._stop_matcher is None and not with_logprobs
        self._min_tokens = min_tokens
        self._received_characters = self._emitted_characters = 0
        self._held_text = ""
        # (token, its logprobs, offset of its text)
        self._held_tokens: deque[tuple[int, TokenLogprobs | None, int]] = deque()

    def echo_prompt(
        self,
        text: str,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        offsets: Sequence[int],
    ) -> Iterator[OutputChunk]:
        """Yield the prompt, before any output. With logprobs, in chunks of `ECHO_CHUNK_TOKENS`."""
        self._received_characters = self._emitted_characters = len(text)
        if self._stop_matcher is not None:
            self._stop_matcher.skip_characters(len(text))
        step = ECHO_CHUNK_TOKENS if logprobs else len(tokens)
        for begin in range(0, len(tokens), step):
            end = begin + step
            text_begin = offsets[begin] if begin else 0
            text_end = offsets[end] if end < len(tokens) else len(text)
            part = slice(begin, end)
            yield OutputChunk(
                self.choice_index,
                text[text_begin:text_end],
                tokens[part],
                logprobs[part],
                offsets[part],
                is_prompt_echo=True,
            )

    def process_tokens(self, event: TokensEvent) -> OutputChunk | None:
        """Return the text that can be emitted, None if all of it is held back.

        Afterwards, `is_stopped` is True if a stop string is complete; then nothing more is emitted.
        """
        if self.is_passthrough:
            return self.process_passthrough(event)
        if self.is_stopped:
            return None
        logprobs = event.logprobs or (None,) * len(event.token_ids)
        for token, token_logprobs in zip(event.token_ids, logprobs, strict=True):
            self.output_tokens += 1
            self._held_tokens.append((token, token_logprobs, self._received_characters))
            if self._append_text(self._detokenizer.append_tokens((token,))):
                break
        return self._emit_chunk(with_logprobs=bool(event.logprobs))

    def process_passthrough(self, event: TokensEvent) -> OutputChunk:
        """`process_tokens` for a processor whose `is_passthrough` is True."""
        tokens = event.token_ids
        self.output_tokens += len(tokens)
        return OutputChunk(self.choice_index, self._detokenizer.append_tokens(tokens), tokens)

    def flush(self) -> OutputChunk | None:
        """Return what is left at the end: held text and an incomplete character."""
        if self.is_stopped:
            return None
        with_logprobs = bool(self._held_tokens) and self._held_tokens[0][1] is not None
        if not self._append_text(self._detokenizer.flush()):
            self._stop_matcher = None
        return self._emit_chunk(with_logprobs=with_logprobs)

    def _append_text(self, text: str) -> bool:
        """Return True once a stop string is complete; the text from its beginning on is dropped."""
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

    def _emit_chunk(self, *, with_logprobs: bool) -> OutputChunk | None:
        held_characters = self._stop_matcher.held_characters if self._stop_matcher else 0
        end = self._received_characters - held_characters
        emitted = end - self._emitted_characters
        text, self._held_text = self._held_text[:emitted], self._held_text[emitted:]
        self._emitted_characters = end
        held: list[tuple[int, TokenLogprobs | None, int]] = []
        while self._held_tokens and (self._stop_matcher is None or self._held_tokens[0][2] < end):
            held.append(self._held_tokens.popleft())
        if not (text or held):
            return None
        tokens, logprobs, offsets = zip(*held, strict=True) if held else ((), (), ())
        if not with_logprobs:
            return OutputChunk(self.choice_index, text, tokens)
        return OutputChunk(self.choice_index, text, tokens, logprobs, offsets)
