"""The parsed output of one choice: its deltas with the ids of calls, and all of it at the end."""

import hashlib
from dataclasses import dataclass, field

from baton.types import FinishReason
from coordinator.frontend.output import OutputChunk, ResponseStream
from coordinator.text.output_parsers.deltas import (
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBroken,
    ToolCallStart,
)


@dataclass(slots=True)
class ParsedCall:
    """A call of a function."""

    id: str
    name: str
    arguments: str = ""  # JSON as the model wrote it


@dataclass(slots=True)
class ParsedMessage:
    """The output of a choice, collected."""

    content: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = field(default_factory=list)


class ParsedChoice:
    """Parses the chunks of one choice."""

    def __init__(self, stream: ResponseStream, choice_index: int) -> None:
        parsing, choice = stream.parsing, stream.choices[choice_index]
        assert parsing is not None
        self.has_calls = False
        self._parser = parsing.create_parser(stream.prompt_token_ids[choice.prompt_index])
        self._is_parallel = parsing.is_parallel
        self._has_short_ids = parsing.has_short_call_ids
        self._id_seed = f"{stream.id}/{choice_index}"

    def parse_chunk(self, chunk: OutputChunk) -> list[OutputDelta]:
        """Return what the chunk adds; the last chunk adds all that was held back."""
        deltas = self._parser.feed_text(chunk.text)
        if chunk.finish_reason is not None:
            deltas += self._parser.finish()
        shown = [delta for delta in deltas if self._is_shown(delta)]
        self.has_calls = self.has_calls or any(isinstance(each, ToolCallStart) for each in shown)
        return shown

    def make_call_id(self, index: int) -> str:
        """Return the id of a call, the same whenever it is asked for."""
        digest = hashlib.sha256(f"{self._id_seed}/{index}".encode()).hexdigest()
        return digest[:9] if self._has_short_ids else f"call_{digest[:24]}"

    def _is_shown(self, delta: OutputDelta) -> bool:
        match delta:
            case ToolCallStart(index) | ToolCallArguments(index) | ToolCallBroken(index):
                return self._is_parallel or index == 0
            case _:
                return True


class MessageCollector:
    """Collects the parsed output of one choice, for a response that is not streamed."""

    def __init__(self, choice: ParsedChoice) -> None:
        self._choice = choice
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._arguments: dict[int, list[str]] = {}
        self._names: dict[int, str] = {}

    def add_chunk(self, chunk: OutputChunk) -> None:
        for delta in self._choice.parse_chunk(chunk):
            match delta:
                case ContentDelta(text):
                    self._content.append(text)
                case ReasoningDelta(text):
                    self._reasoning.append(text)
                case ToolCallStart(index, name):
                    self._names[index] = name
                    self._arguments[index] = []
                case ToolCallArguments(index, text):
                    self._arguments[index].append(text)
                case ToolCallBroken(index, text):
                    del self._names[index]
                    self._content.append(text)

    def collect_message(self) -> ParsedMessage:
        calls = [
            ParsedCall(self._choice.make_call_id(index), name, "".join(self._arguments[index]))
            for index, name in self._names.items()
        ]
        return ParsedMessage("".join(self._content), "".join(self._reasoning), calls)


def finish_reason_text(reason: FinishReason, *, has_calls: bool, is_named: bool) -> str:
    """Return OpenAI's finish reason: `tool_calls`, unless one function had to be called."""
    if reason is FinishReason.STOP and has_calls and not is_named:
        return "tool_calls"
    return reason.value
