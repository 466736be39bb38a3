"""A request under way: its choices, each a generation of its own, read as one stream of pieces."""

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
    """A prompt to be given back: its text, and where in it each token begins."""

    text: str
    token_offsets: Sequence[int]


@dataclass(slots=True)
class ChoiceStream:
    """`has_started` once its first piece is: until then, events wait in `buffered_events` for the
    scores of its prompt. `is_passthrough` if from then on each step is one piece, whatever it
    brings."""

    generation: Generation
    output_processor: OutputProcessor
    prompt_index: int  # its number among the request's prompts
    has_started: bool = False
    is_passthrough: bool = False
    buffered_events: list[GenerationEvent] = field(default_factory=list)


@dataclass(slots=True)
class ResponseStream:
    """`choices` in the order of their indices, those of one prompt side by side, the first of them
    with the scores of the prompt. `prompt_tokens`, `completion_tokens` and `cached_tokens` are of
    all of them, the last one complete at the end; `timeline` is the first's.

    With `is_echo_only` nothing that was generated is told."""

    model: str
    created_unix_seconds: int  # seconds since the epoch, for clients to read
    tokenizer: Tokenizer
    prompt_token_ids: Sequence[tuple[int, ...]]
    choices: list[ChoiceStream]
    prompt_echoes: Sequence[PromptEcho] = ()
    has_logprobs: bool = False
    is_echo_only: bool = False
    cached_tokens: int = 0
    timeline: Timeline = field(default_factory=Timeline)
    prompt_tokens: int = field(init=False)
    completion_tokens: int = field(
        init=False, default=0
    )  # up to the last piece: each event may ask for it

    def __post_init__(self) -> None:
        self.prompt_tokens = sum(map(len, self.prompt_token_ids))

    @property
    def id(self) -> RequestId:
        return self.choices[0].generation.id

    async def output_chunks(self) -> AsyncIterator[OutputChunk]:
        """The last piece of each choice has its `finish`. The first error of any choice is raised,
        and ends the others."""
        try:
            async for index, event in merge_generations(
                [choice.generation for choice in self.choices]
            ):
                choice = self.choices[index]
                if (
                    choice.is_passthrough and type(event) is TokensEvent
                ):  # nearly all there is: no generators for these
                    self.completion_tokens += len(event.token_ids)
                    yield choice.output_processor.process_passthrough(event)
                    continue
                for piece in self._process_event(choice, event):
                    yield piece
                    if piece.is_prompt_echo:
                        await asyncio.sleep(
                            0
                        )  # a long prompt takes long to word: other requests have their turn
        except Exception:
            self.cancel()
            raise
        if not all(choice.has_started for choice in self.choices):
            raise AssertionError("the scores of a prompt never came")

    def cancel(self) -> None:
        """The client is gone, or has been told of an error. Idempotent."""
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
        self, prompt: int, scores: Sequence[TokenLogprobs]
    ) -> Iterator[OutputChunk]:
        """The scores of a prompt have come, which all of its choices wait for."""
        for choice in self.choices:
            if choice.prompt_index == prompt and not choice.has_started:
                yield from self._start_choice(choice, (None, *scores))
                for event in choice.buffered_events:
                    yield from self._process_output(choice, event)
                choice.buffered_events.clear()

    def _start_choice(
        self, choice: ChoiceStream, scores: Sequence[TokenLogprobs | None]
    ) -> Iterator[OutputChunk]:
        choice.has_started = True
        choice.is_passthrough = choice.output_processor.is_passthrough and not self.is_echo_only
        if self.prompt_echoes:
            echo = self.prompt_echoes[choice.prompt_index]
            yield from choice.output_processor.echo_prompt(
                echo.text, self.prompt_token_ids[choice.prompt_index], scores, echo.token_offsets
            )

    def _process_output(
        self, choice: ChoiceStream, event: GenerationEvent
    ) -> Iterator[OutputChunk]:
        teller = choice.output_processor
        if isinstance(event, TokensEvent):
            if self.is_echo_only:
                return
            before = teller.output_tokens
            piece = teller.process_tokens(event)
            self.completion_tokens += teller.output_tokens - before
            if piece is not None:
                yield piece
            if teller.is_stopped:
                choice.generation.stop()
        elif isinstance(event, FinishedEvent):
            rest = None if self.is_echo_only else teller.flush()
            if rest is not None:
                yield rest
            self._count_cached_tokens(choice, event)
            reason = (
                FinishReason.STOP
                if teller.is_stopped
                else FinishReason.LENGTH
                if self.is_echo_only
                else event.finish_reason
            )
            yield OutputChunk(teller.choice_index, "", finish_reason=reason)

    def _count_cached_tokens(self, choice: ChoiceStream, end: FinishedEvent) -> None:
        """Prompt tokens are counted once for a prompt, so those that came from a cache are, too."""
        first = next(other for other in self.choices if other.prompt_index == choice.prompt_index)
        self.cached_tokens += end.cached_tokens if choice is first else 0
        if choice is self.choices[0]:
            self.timeline = end.timeline
