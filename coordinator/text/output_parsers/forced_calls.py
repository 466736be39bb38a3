"""Tool calls of a request that asks for them: all of the output is JSON, and none of it is content.

The output is constrained to be the arguments of the function that `tool_choice` names, or for
`required` an array of `{"name": ..., "parameters": ...}`.
"""

from coordinator.text.output_parsers.call_array import CallArrayParser
from coordinator.text.output_parsers.call_reader import ArgumentsReader
from coordinator.text.output_parsers.deltas import OutputDelta
from coordinator.text.output_parsers.tool_calls import WHITESPACE, ToolCallParser


class NamedCallParser(ToolCallParser):
    """All of the output is the arguments of one call."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._begin_call(ArgumentsReader(name))

    def _read_content(self, text: str) -> str:
        self._add_content(text)
        return ""

    def _after_call(self, text: str) -> str:
        return self._read_content(text)


class RequiredCallsParser(CallArrayParser):
    """All of the output is one array of calls."""

    def __init__(self) -> None:
        super().__init__()
        self._state = self._read_opening

    def finish(self) -> list[OutputDelta]:
        if self._is_in_array:
            # The output was cut off before the name of a call was complete.
            self._call_text.clear()
            self._held_space = ""
        return super().finish()

    def _read_opening(self, text: str) -> str:
        begun = text.lstrip(WHITESPACE)
        self._add_content(text[: len(text) - len(begun)])
        if begun.startswith("["):
            return self._begin_array(begun)
        if begun:
            self._state = self._read_content
        return begun

    def _read_content(self, text: str) -> str:
        self._add_content(text)
        return ""
