"""What the parsers of all formats of tool calls have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from coordinator.text.output_parsers.call_reader import CallReader
from coordinator.text.output_parsers.deltas import (
    ContentDelta,
    OutputDelta,
    ToolCallArguments,
    ToolCallBroken,
    ToolCallStart,
    join_deltas,
)
from coordinator.text.output_parsers.json_scanner import Progress
from coordinator.text.output_parsers.tag_finder import TagFinder

# Consumes a beginning of the text and returns the rest; it may change the state.
State = Callable[[str], str]
WHITESPACE = " \t\n\r"
MAX_DROPPED_SPACE = 256  # characters of whitespace next to a call, so that a step looks at few


class ToolCallParser(ABC):
    """Finds tool calls in the text of one choice; what is no valid call stays content.

    Whitespace before the first call and after each is dropped where no other content is beside it.
    """

    def __init__(self, start_tag: str = "") -> None:
        """`start_tag` begins a call or a list of them, wherever it is in the text."""
        self._start_tag = start_tag
        self._state: State = self._read_content
        self._deltas: list[OutputDelta] = []
        self._tag_finder = TagFinder(start_tag)
        self._held_space = ""  # whitespace at the beginning or after a call
        self._has_content = False  # since the beginning, or since the last call
        self._calls = 0
        self._call: CallReader | None = None
        self._call_text: list[str] = []  # of the unfinished call, with its tags
        self._is_announced = False

    def feed_text(self, text: str) -> list[OutputDelta]:
        while text:
            text = self._state(text)
        return self._take_deltas()

    def finish(self) -> list[OutputDelta]:
        self._add_content(self._tag_finder.flush())
        if self._call_text and not self._is_announced:
            self._add_content("".join(self._call_text))
            self._call_text.clear()
        if not self._calls and self._held_space:
            self._deltas.append(ContentDelta(self._held_space))
        self._held_space = ""
        return self._take_deltas()

    def _take_deltas(self) -> list[OutputDelta]:
        deltas, self._deltas = join_deltas(self._deltas), []
        return deltas

    def _add_content(self, text: str) -> None:
        if not self._has_content:
            content = text.lstrip(WHITESPACE)
            self._held_space += text[: len(text) - len(content)]
            if not content and len(self._held_space) <= MAX_DROPPED_SPACE:
                return
            self._has_content = True
            text, self._held_space = self._held_space + content, ""
        if text:
            self._deltas.append(ContentDelta(text))

    def _read_content(self, text: str) -> str:
        before, rest = self._tag_finder.feed_text(text)
        self._add_content(before)
        if rest is None:
            return ""
        self._call_text = [self._start_tag]
        self._state = self._on_start_tag
        return rest

    def _on_start_tag(self, text: str) -> str:
        """Read what follows the start tag; returns the rest.

        Formats with a start tag override it. Without one, no tag is ever found.
        """
        raise NotImplementedError(f"{type(self).__name__} has no start tag")

    def _begin_call(self, call: CallReader) -> None:
        self._call = call
        self._is_announced = False
        self._state = self._read_call

    def _read_call(self, text: str) -> str:
        assert self._call is not None
        end, progress = 0, Progress.MORE
        while end < len(text) and progress is Progress.MORE:
            progress = self._call.feed_character(text[end])
            end += progress in (Progress.MORE, Progress.DONE)
        self._on_call_text(text[:end])
        if progress is Progress.DONE:
            self._end_call()
            self._state = self._after_call
        elif progress is not Progress.MORE:
            self._break_call()
        return text[end:]

    def _on_call_text(self, text: str) -> None:
        """Note text of the call, and emit what is certain of it."""
        assert self._call is not None
        self._call_text.append(text)
        if self._call.name is None:
            return
        if not self._is_announced:
            self._is_announced = True
            self._held_space = ""
            self._deltas.append(ToolCallStart(self._calls, self._call.name))
        if arguments := self._call.take_arguments():
            self._deltas.append(ToolCallArguments(self._calls, arguments))

    def _end_call(self) -> None:
        self._calls += 1
        self._call = None
        self._call_text = []
        self._has_content = False

    def _break_call(self) -> None:
        """Give up the unfinished call: its text is content."""
        text = "".join(self._call_text)
        if self._is_announced:
            self._deltas.append(ToolCallBroken(self._calls, text))
            self._calls += 1
            self._has_content = True
        else:
            self._add_content(text)
        self._call = None
        self._call_text = []
        self._state = self._read_content

    @abstractmethod
    def _after_call(self, text: str) -> str:
        """Read what follows a complete call; returns the rest."""
