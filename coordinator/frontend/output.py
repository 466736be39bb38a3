"""The output of one request: the tokens of all its choices, as one stream of chunks of text.

However the tokens are cut into events, the texts of all chunks of a choice concatenate to the same
text, up to a stop string, and their tokens to the same tokens.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from baton.types import FinishReason, RequestId, TokenLogprobs
from coordinator.core.common.timeline import Timeline
from coordinator.frontend.merged_generations import merge_generations
from coordinator.frontend.output_parsing import OutputParsing
from coordinator.generation import (
    FinishedEvent,
    Generation,
    GenerationEvent,
    PromptLogprobsEvent,
    TokensEvent,
)
from coordinator.text.detokenizer import IncrementalDetokenizer, StopStringMatcher
from coordinator.text.tokenizer import Tokenizer

# Prompt tokens with logprobs in one chunk. Each may list 20 others, which are slow to encode.
PROMPT_CHUNK_TOKENS = 256


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
    # In the last chunk, the stop string that was found, or the one of `stop_token_ids` that was
    # drawn; None for any other end.
    stop_reason: int | str | None = None
    is_prompt_echo: bool = False  # the chunk repeats the prompt or a part of it (`echo`)
    # Of the next tokens of the choice's prompt, in a chunk that has nothing else
    # (`prompt_logprobs`). Only the first choice of a prompt has such chunks.
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()


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
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        """The first `min_tokens` tokens are not searched for stop strings.

        `stop_token_ids` are those of the request, of which one may be its `stop_reason`.
        """
        self.choice_index = choice_index
        self.output_tokens = 0  # up to the token that completed a stop string
        self.is_stopped = False
        self._detokenizer = detokenizer
        self._stop_matcher = StopStringMatcher(stop) if stop else None
        # Without stop strings and logprobs, each event becomes one chunk at once.
        self.is_passthrough = self._stop_matcher is None and not with_logprobs
        self._min_tokens = min_tokens
        self._stop_token_ids = stop_token_ids
        self._last_token: int | None = None
        self._received_characters = self._emitted_characters = 0
        self._held_text = ""
        # (token, its logprobs, offset of its text)
        self._held_tokens: deque[tuple[int, TokenLogprobs | None, int]] = deque()

    @property
    def stop_reason(self) -> int | str | None:
        """What a normally ended output stopped at: a stop string, or one of `stop_token_ids`."""
        if self.is_stopped and self._stop_matcher is not None:
            return self._stop_matcher.matched_string
        return self._last_token if self._last_token in self._stop_token_ids else None

    def echo_prompt(
        self,
        text: str,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        offsets: Sequence[int],
        max_alternatives: int = 0,
    ) -> Iterator[OutputChunk]:
        """Yield the prompt, with logprobs in chunks of `PROMPT_CHUNK_TOKENS`.

        Each entry has at most `max_alternatives` of the likeliest tokens.
        """
        self._received_characters = self._emitted_characters = len(text)
        if self._stop_matcher is not None:
            self._stop_matcher.skip_characters(len(text))
        step = PROMPT_CHUNK_TOKENS if logprobs else len(tokens)
        for begin in range(0, len(tokens), step):
            end = begin + step
            text_begin = offsets[begin] if begin else 0
            text_end = offsets[end] if end < len(tokens) else len(text)
            part = slice(begin, end)
            yield OutputChunk(
                self.choice_index,
                text[text_begin:text_end],
                tokens[part],
                _limit_alternatives(logprobs[part], max_alternatives),
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
        self._last_token = event.token_ids[-1]
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
        self._last_token = tokens[-1]
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


def _limit_alternatives(
    logprobs: Sequence[TokenLogprobs | None], count: int
) -> Sequence[TokenLogprobs | None]:
    """Return the entries with at most `count` of the likeliest tokens each."""
    if all(entry is None or len(entry.top_logprobs) <= count for entry in logprobs):
        return logprobs
    return [
        None if entry is None else TokenLogprobs(entry.logprob, entry.top_logprobs[:count])
        for entry in logprobs
    ]


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """A prompt that is returned before its output (`echo`)."""

    text: str
    token_offsets: Sequence[int]  # where each token begins in the text, in characters


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """How many of the likeliest tokens are given beside each prompt token; None: no logprobs."""

    echoed: int | None = None  # in the prompt that is returned before its output
    separate: int | None = None  # in `prompt_logprobs`

    @property
    def is_enabled(self) -> bool:
        return self.echoed is not None or self.separate is not None


@dataclass(slots=True)
class ChoiceStream:
    """One choice of a request."""

    generation: Generation
    make_output_processor: Callable[[], OutputProcessor]
    prompt_index: int  # among the request's prompts
    output_processor: OutputProcessor = field(init=False)  # made when the choice starts
    has_started: bool = False  # its first chunk may be emitted
    is_passthrough: bool = False  # each event becomes one chunk at once
    # Events that wait for the logprobs of the prompt, until the choice has started.
    buffered_events: list[GenerationEvent] = field(default_factory=list)


@dataclass(slots=True)
class ResponseStream:
    """All choices of one request, read as one stream. Token counts are sums over all choices."""

    model: str
    created_unix_seconds: int  # since the epoch
    tokenizer: Tokenizer
    prompt_token_ids: Sequence[tuple[int, ...]]
    # By index. Choices of one prompt are adjacent; the first of them brings the prompt's logprobs.
    choices: list[ChoiceStream]
    prompt_echoes: Sequence[PromptEcho] = ()
    prompt_scoring: PromptScoring = PromptScoring()
    is_echo_only: bool = False  # no generated token is returned
    parsing: OutputParsing | None = None  # None: all of the output is content
    cached_tokens: int = 0  # complete at the end only
    timeline: Timeline = field(default_factory=Timeline)  # of the first choice
    prompt_tokens: int = field(init=False)
    completion_tokens: int = field(init=False, default=0)  # up to the last chunk

    def __post_init__(self) -> None:
        self.prompt_tokens = sum(map(len, self.prompt_token_ids))

    @property
    def id(self) -> RequestId:
        return self.choices[0].generation.id

    def get_prompt_token_ids(self, choice_index: int) -> tuple[int, ...]:
        return self.prompt_token_ids[self.choices[choice_index].prompt_index]

    async def output_chunks(self) -> AsyncIterator[OutputChunk]:
        """Yield the chunks of all choices; the last chunk of each has its finish reason.

        The first error of any choice is raised and cancels the others.
        """
        try:
            async for index, event in merge_generations(
                [choice.generation for choice in self.choices]
            ):
                choice = self.choices[index]
                # Nearly all events take this path, so it makes no generator.
                if choice.is_passthrough and type(event) is TokensEvent:
                    self.completion_tokens += len(event.token_ids)
                    yield choice.output_processor.process_passthrough(event)
                    continue
                for chunk in self._process_event(choice, event):
                    yield chunk
                    if chunk.is_prompt_echo or chunk.prompt_logprobs:
                        await asyncio.sleep(0)  # let other requests run: a prompt can be long
        except Exception:
            self.cancel()
            raise
        if not all(choice.has_started for choice in self.choices):
            raise AssertionError("the logprobs of a prompt were never reported")

    def cancel(self) -> None:
        """Cancel all choices: the client has disconnected or got an error. Idempotent."""
        for choice in self.choices:
            choice.generation.cancel()

    def _process_event(self, choice: ChoiceStream, event: GenerationEvent) -> Iterator[OutputChunk]:
        if choice.has_started:
            yield from self._process_output(choice, event)
        elif isinstance(event, PromptLogprobsEvent):
            yield from self._on_prompt_logprobs(choice, event.logprobs)
        elif self.prompt_scoring.is_enabled:
            choice.buffered_events.append(event)
        else:
            yield from self._start_choice(choice, ())
            yield from self._process_output(choice, event)

    def _on_prompt_logprobs(
        self, scored: ChoiceStream, logprobs: Sequence[TokenLogprobs]
    ) -> Iterator[OutputChunk]:
        """Start the choices of a prompt, which have waited for its logprobs."""
        of_all_tokens = (None, *logprobs)
        for choice in self.choices:
            if choice.prompt_index == scored.prompt_index and not choice.has_started:
                yield from self._start_choice(choice, of_all_tokens)
                if choice is scored:
                    yield from self._split_prompt_logprobs(choice, of_all_tokens)
                for event in choice.buffered_events:
                    yield from self._process_output(choice, event)
                choice.buffered_events.clear()

    def _split_prompt_logprobs(
        self, choice: ChoiceStream, logprobs: Sequence[TokenLogprobs | None]
    ) -> Iterator[OutputChunk]:
        """Yield the logprobs of a prompt in chunks, if `prompt_logprobs` asks for them."""
        count = self.prompt_scoring.separate
        if count is None:
            return
        for begin in range(0, len(logprobs), PROMPT_CHUNK_TOKENS):
            part = _limit_alternatives(logprobs[begin : begin + PROMPT_CHUNK_TOKENS], count)
            yield OutputChunk(choice.output_processor.choice_index, "", prompt_logprobs=part)

    def _start_choice(
        self, choice: ChoiceStream, logprobs: Sequence[TokenLogprobs | None]
    ) -> Iterator[OutputChunk]:
        choice.has_started = True
        choice.output_processor = choice.make_output_processor()
        choice.is_passthrough = choice.output_processor.is_passthrough and not self.is_echo_only
        if self.prompt_echoes:
            echo = self.prompt_echoes[choice.prompt_index]
            scored = logprobs if self.prompt_scoring.echoed is not None else ()
            yield from choice.output_processor.echo_prompt(
                echo.text,
                self.prompt_token_ids[choice.prompt_index],
                scored,
                echo.token_offsets,
                max_alternatives=self.prompt_scoring.echoed or 0,
            )

    def _process_output(
        self, choice: ChoiceStream, event: GenerationEvent
    ) -> Iterator[OutputChunk]:
        processor = choice.output_processor
        if isinstance(event, TokensEvent):
            if self.is_echo_only:
                return
            tokens_before = processor.output_tokens
            chunk = processor.process_tokens(event)
            self.completion_tokens += processor.output_tokens - tokens_before
            if chunk is not None:
                yield chunk
            if processor.is_stopped:
                choice.generation.stop()
        elif isinstance(event, FinishedEvent):
            rest = None if self.is_echo_only else processor.flush()
            if rest is not None:
                yield rest
            self._count_cached_tokens(choice, event)
            reason = event.finish_reason
            if processor.is_stopped:
                reason = FinishReason.STOP
            elif self.is_echo_only:
                reason = FinishReason.LENGTH
            stop_reason = processor.stop_reason if reason is FinishReason.STOP else None
            yield OutputChunk(
                processor.choice_index, "", finish_reason=reason, stop_reason=stop_reason
            )

    def _count_cached_tokens(self, choice: ChoiceStream, end: FinishedEvent) -> None:
        """Count cached prompt tokens once a prompt, as its prompt tokens are."""
        first = next(other for other in self.choices if other.prompt_index == choice.prompt_index)
        self.cached_tokens += end.cached_tokens if choice is first else 0
        if choice is self.choices[0]:
            self.timeline = end.timeline
