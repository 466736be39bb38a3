"""What a parser makes of a text: content, reasoning and calls, in the order of their deltas."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from coordinator.text.output_parsers.deltas import (
    ContentDelta,
    OutputDelta,
    OutputParser,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBroken,
    ToolCallStart,
    join_deltas,
)


@dataclass
class ParsedOutput:
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


def parse_pieces(parser: OutputParser, pieces: Iterable[str]) -> list[OutputDelta]:
    deltas = [delta for piece in pieces for delta in parser.feed_text(piece)]
    return join_deltas([*deltas, *parser.finish()])


def cut(text: str, places: Sequence[int]) -> list[str]:
    """The text cut at these places, in any order."""
    bounds = [0, *sorted(place for place in places if place < len(text)), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(bounds)]


def parse_text(make_parser: Callable[[], OutputParser], text: str) -> ParsedOutput:
    """The output of the whole text, which must equal that of its single characters."""
    deltas = parse_pieces(make_parser(), [text])
    assert parse_pieces(make_parser(), text) == deltas
    return collect_output(deltas)


def collect_output(deltas: Iterable[OutputDelta]) -> ParsedOutput:
    output = ParsedOutput()
    for delta in deltas:
        match delta:
            case ContentDelta(text):
                output.content += text
            case ReasoningDelta(text):
                output.reasoning += text
            case ToolCallStart(index, name):
                assert index == len(output.calls)
                output.calls.append((name, ""))
            case ToolCallArguments(index, text):
                name, before = output.calls[index]
                assert index == len(output.calls) - 1
                output.calls[index] = (name, before + text)
            case ToolCallBroken(_, text):
                output.broken.append(text)
    return output
