"""Tells the reasoning of a model, between `<think>` and `</think>`, from its answer."""

from collections.abc import Callable

from coordinator.text.output_parsers.deltas import (
    ContentDelta,
    OutputDelta,
    OutputParser,
    ReasoningDelta,
    join_deltas,
)
from coordinator.text.output_parsers.tag_finder import TagFinder

START_TAG = "<think>"
END_TAG = "</think>"
_WHITESPACE = " \t\n\r"
MAX_DROPPED_SPACE = 256  # characters of whitespace before a tag, so that a step looks at few


class ReasoningParser:
    """Gives what is outside of the tags to another parser, if there is one.

    Only what begins the output is reasoning. Whitespace next to the tags belongs to them.
    """

    def __init__(self, *, starts_inside: bool, answer_parser: OutputParser | None = None) -> None:
        """`starts_inside`: an output without a start tag begins with reasoning too."""
        self._starts_inside = starts_inside
        self._answer_parser = answer_parser
        self._state: Callable[[str], str] = self._read_start
        self._deltas: list[OutputDelta] = []
        self._held = ""  # text that may be part of the start tag, or whitespace before the end tag
        self._end_finder = TagFinder(END_TAG)

    def feed_text(self, text: str) -> list[OutputDelta]:
        while text:
            text = self._state(text)
        return self._take_deltas()

    def finish(self) -> list[OutputDelta]:
        held, self._held = self._held, ""
        if self._state == self._read_start and not self._starts_inside:
            self._add_answer(held)
        elif self._state != self._read_answer:
            self._add_reasoning(held + self._end_finder.flush())
        if self._answer_parser is not None:
            self._deltas += self._answer_parser.finish()
        return self._take_deltas()

    def _take_deltas(self) -> list[OutputDelta]:
        deltas, self._deltas = join_deltas(self._deltas), []
        return deltas

    def _read_start(self, text: str) -> str:
        self._held += text
        begun = self._held.lstrip(_WHITESPACE)
        is_near = len(self._held) - len(begun) <= MAX_DROPPED_SPACE
        if is_near and len(begun) < len(START_TAG) and START_TAG.startswith(begun):
            return ""
        held, self._held = self._held, ""
        if is_near and begun.startswith(START_TAG):
            self._state = self._skip_space_before_reasoning
            return begun.removeprefix(START_TAG)
        if self._starts_inside:
            self._state = self._skip_space_before_reasoning
            return begun
        self._state = self._read_answer
        return held

    def _skip_space_before_reasoning(self, text: str) -> str:
        rest = text.lstrip(_WHITESPACE)
        if rest:
            self._state = self._read_reasoning
        return rest

    def _read_reasoning(self, text: str) -> str:
        before, rest = self._end_finder.feed_text(text)
        before = self._held + before
        end = max(len(before.rstrip(_WHITESPACE)), len(before) - MAX_DROPPED_SPACE)
        self._held = before[end:]
        self._add_reasoning(before[:end])
        if rest is None:
            return ""
        self._held = ""
        self._state = self._skip_space_before_answer
        return rest

    def _skip_space_before_answer(self, text: str) -> str:
        rest = text.lstrip(_WHITESPACE)
        if rest:
            self._state = self._read_answer
        return rest

    def _read_answer(self, text: str) -> str:
        self._add_answer(text)
        return ""

    def _add_reasoning(self, text: str) -> None:
        if text:
            self._deltas.append(ReasoningDelta(text))

    def _add_answer(self, text: str) -> None:
        if self._answer_parser is not None:
            self._deltas += self._answer_parser.feed_text(text)
        elif text:
            self._deltas.append(ContentDelta(text))
