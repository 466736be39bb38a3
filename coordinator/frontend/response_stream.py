"""The output of one request: the generations of all its choices as one stream of chunks."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

from baton.pb.common_pb2 import Timeline
from baton.types import FinishReason, RequestId, TokenLogprobs
from coordinator.frontend.generation_merge import merge_generations
from coordinator.frontend.output import OutputChunk, OutputProcessor
from coordinator.generation import (
    FinishedEvent,
    Generation,
    GenerationEvent,
    PromptLogprobsEvent,
    TokensEvent,
)
from coordinator.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """A prompt that is returned before its output (`echo`)."""

    text: str
    token_offsets: Sequence[int]  # where each token begins in the text, in characters


@dataclass(slots=True)
class ChoiceStream:
    """One choice of a request."""

    generation: Generation
    output_processor: OutputProcessor
    prompt_index: int  # among the request's prompts
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
