"""A request under way: its choices, each a generation of its own, read as one stream of pieces."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

from baton.pb.common_pb2 import Timeline
from baton.types import FinishReason, RequestId, TokenScore
from coordinator.generation import Delta, Done, Event, Generation, PromptScores
from coordinator.merging import merged
from coordinator.telling import Piece, Teller
from coordinator.tokenizer import Text


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt to be given back: its text, and where in it each token begins."""

    text: str
    starts: Sequence[int]


@dataclass(slots=True)
class Choice:
    """`told` once its first piece is: until then, events wait in `early` for the scores of its prompt. `plain` if from
    then on each step is one piece, whatever it brings."""

    generation: Generation
    teller: Teller
    prompt: int  # its number among the request's prompts
    told: bool = False
    plain: bool = False
    early: list[Event] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """`choices` in the order of their indices, those of one prompt side by side, the first of them with the scores of
    the prompt. `prompt_tokens`, `completion_tokens` and `cached_tokens` are of all of them, the last one complete at
    the end; `timeline` is the first's.

    With `only_echo` nothing that was generated is told."""

    model: str
    created: int  # seconds since the epoch, for clients to read
    text: Text
    prompts: Sequence[tuple[int, ...]]
    choices: list[Choice]
    echoes: Sequence[Echo] = ()
    scored: bool = False
    only_echo: bool = False
    cached_tokens: int = 0
    timeline: Timeline = field(default_factory=Timeline)
    prompt_tokens: int = field(init=False)
    completion_tokens: int = field(init=False, default=0)  # up to the last piece: each event may ask for it

    def __post_init__(self) -> None:
        self.prompt_tokens = sum(map(len, self.prompts))

    @property
    def id(self) -> RequestId:
        return self.choices[0].generation.id

    async def pieces(self) -> AsyncIterator[Piece]:
        """The last piece of each choice has its `finish`. The first error of any choice is raised, and ends the
        others."""
        try:
            async for index, event in merged([choice.generation for choice in self.choices]):
                choice = self.choices[index]
                if choice.plain and type(event) is Delta:  # nearly all there is: no generators for these
                    self.completion_tokens += len(event.tokens)
                    yield choice.teller.whole(event)
                    continue
                for piece in self._pieces_of(choice, event):
                    yield piece
                    if piece.echo:
                        await asyncio.sleep(0)  # a long prompt takes long to word: other requests have their turn
        except Exception:
            self.cancel()
            raise
        if not all(choice.told for choice in self.choices):
            raise AssertionError("the scores of a prompt never came")

    def cancel(self) -> None:
        """The client is gone, or has been told of an error. Idempotent."""
        for choice in self.choices:
            choice.generation.cancel()

    def _pieces_of(self, choice: Choice, event: Event) -> Iterator[Piece]:
        if choice.told:
            yield from self._tell(choice, event)
        elif isinstance(event, PromptScores):
            yield from self._open(choice.prompt, event.scores)
        elif self.echoes and self.scored:
            choice.early.append(event)
        else:
            yield from self._begin(choice, ())
            yield from self._tell(choice, event)

    def _open(self, prompt: int, scores: Sequence[TokenScore]) -> Iterator[Piece]:
        """The scores of a prompt have come, which all of its choices wait for."""
        for choice in self.choices:
            if choice.prompt == prompt and not choice.told:
                yield from self._begin(choice, (None, *scores))
                for event in choice.early:
                    yield from self._tell(choice, event)
                choice.early.clear()

    def _begin(self, choice: Choice, scores: Sequence[TokenScore | None]) -> Iterator[Piece]:
        choice.told = True
        choice.plain = choice.teller.plain and not self.only_echo
        if self.echoes:
            echo = self.echoes[choice.prompt]
            yield from choice.teller.echo(echo.text, self.prompts[choice.prompt], scores, echo.starts)

    def _tell(self, choice: Choice, event: Event) -> Iterator[Piece]:
        teller = choice.teller
        if isinstance(event, Delta):
            if self.only_echo:
                return
            before = teller.tokens
            piece = teller.tell(event)
            self.completion_tokens += teller.tokens - before
            if piece is not None:
                yield piece
            if teller.stopped:
                choice.generation.stop()
        elif isinstance(event, Done):
            rest = None if self.only_echo else teller.rest()
            if rest is not None:
                yield rest
            self._count(choice, event)
            reason = FinishReason.STOP if teller.stopped else FinishReason.LENGTH if self.only_echo else event.reason
            yield Piece(teller.index, "", finish=reason)

    def _count(self, choice: Choice, end: Done) -> None:
        """Prompt tokens are counted once for a prompt, so those that came from a cache are, too."""
        first = next(other for other in self.choices if other.prompt == choice.prompt)
        self.cached_tokens += end.cached_tokens if choice is first else 0
        if choice is self.choices[0]:
            self.timeline = end.timeline
