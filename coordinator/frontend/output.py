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


async def merge_generations(
    generations: Sequence[Generation],
) -> AsyncIterator[tuple[int, GenerationEvent]]:
    """Yield (generation index, event), in order within each generation; stop at the first error.

    At most one event of each generation is buffered here; the others stay in the generations'
    bounded buffers.
    """
    if len(generations) == 1:
        async for event in generations[0]:
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, GenerationEvent | Exception]] = asyncio.Queue(len(generations))
    readers = [
        asyncio.create_task(_read_generation(*numbered, queue))
        for numbered in enumerate(generations)
    ]
    left = len(readers)
    try:
        while left:
            number, read = await queue.get()
            if isinstance(read, Exception):
                raise read
            left -= isinstance(read, FinishedEvent)
            yield number, read
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read_generation(
    number: int,
    generation: Generation,
    queue: "asyncio.Queue[tuple[int, GenerationEvent | Exception]]",
) -> None:
    try:
        async for event in generation:
            await queue.put((number, event))
    except Exception as error:
        await queue.put((number, error))


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """A prompt that is returned before its output (`echo`)."""

    text: str
    token_offsets: Sequence[int]  # where each token begins in the text, in characters


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
    has_logprobs: bool = False
    is_echo_only: bool = False  # no generated token is returned
    cached_tokens: int = 0  # complete at the end only
    timeline: Timeline = field(default_factory=Timeline)  # of the first choice
    prompt_tokens: int = field(init=False)
    completion_tokens: int = field(init=False, default=0)  # up to the last chunk

    def __post_init__(self) -> None:
        self.prompt_tokens = sum(map(len, self.prompt_token_ids))

    @property
    def id(self) -> RequestId:
        return self.choices[0].generation.id

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
                    if chunk.is_prompt_echo:
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
            yield from self._on_prompt_logprobs(choice.prompt_index, event.logprobs)
        elif self.prompt_echoes and self.has_logprobs:
            choice.buffered_events.append(event)
        else:
            yield from self._start_choice(choice, ())
            yield from self._process_output(choice, event)

    def _on_prompt_logprobs(
        self, prompt_index: int, logprobs: Sequence[TokenLogprobs]
    ) -> Iterator[OutputChunk]:
        """Start the choices of a prompt, which have waited for its logprobs."""
        for choice in self.choices:
            if choice.prompt_index == prompt_index and not choice.has_started:
                yield from self._start_choice(choice, (None, *logprobs))
                for event in choice.buffered_events:
                    yield from self._process_output(choice, event)
                choice.buffered_events.clear()

    def _start_choice(
        self, choice: ChoiceStream, logprobs: Sequence[TokenLogprobs | None]
    ) -> Iterator[OutputChunk]:
        choice.has_started = True
        choice.output_processor = choice.make_output_processor()
        choice.is_passthrough = choice.output_processor.is_passthrough and not self.is_echo_only
        if self.prompt_echoes:
            echo = self.prompt_echoes[choice.prompt_index]
            yield from choice.output_processor.echo_prompt(
                echo.text, self.prompt_token_ids[choice.prompt_index], logprobs, echo.token_offsets
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
            yield OutputChunk(processor.choice_index, "", finish_reason=reason)

    def _count_cached_tokens(self, choice: ChoiceStream, end: FinishedEvent) -> None:
        """Count cached prompt tokens once a prompt, as its prompt tokens are."""
        first = next(other for other in self.choices if other.prompt_index == choice.prompt_index)
        self.cached_tokens += end.cached_tokens if choice is first else 0
        if choice is self.choices[0]:
            self.timeline = end.timeline
