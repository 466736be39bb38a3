"""What the parsers of model output produce: content, reasoning and tool calls, piece by piece."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Text that the model wrote before its answer, between its tags of reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call has begun; `index` counts the calls of one choice from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of a call's arguments, JSON as the model wrote it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBroken:
    """A call that has begun is not valid JSON; the text after it is parsed as usual.

    A reader of the whole output shows the text of the call as content, and no call. A reader of the
    stream has seen its beginning as a call already.
    """

    index: int
    text: str  # of the call up to the error, as the model wrote it, with tags


OutputDelta = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments | ToolCallBroken


class OutputParser(Protocol):
    """Turns the text of one choice into deltas, fed in pieces of any size.

    However the text is cut into pieces, the deltas join to the same. No text raises an error.
    """

    def feed_text(self, text: str) -> list[OutputDelta]:
        """Return what this piece completes; text that may be part of a tag is held back."""
        ...

    def finish(self) -> list[OutputDelta]:
        """Return what is held back at the end of the output."""
        ...


def join_deltas(deltas: Sequence[OutputDelta]) -> list[OutputDelta]:
    """Join neighbouring deltas of the same kind."""
    joined: list[OutputDelta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        match last, delta:
            case (ContentDelta(), ContentDelta()):
                joined[-1] = ContentDelta(last.text + delta.text)
            case (ReasoningDelta(), ReasoningDelta()):
                joined[-1] = ReasoningDelta(last.text + delta.text)
            case (ToolCallArguments(), ToolCallArguments()) if last.index == delta.index:
                joined[-1] = ToolCallArguments(last.index, last.text + delta.text)
            case _:
                joined.append(delta)
    return joined
