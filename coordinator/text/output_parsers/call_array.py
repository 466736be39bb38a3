"""Reads a JSON array of tool calls: `[{"name": "f", "arguments": {"x": 1}}, ...]`."""

from coordinator.text.output_parsers.call_reader import CallObjectReader
from coordinator.text.output_parsers.tool_calls import WHITESPACE, ToolCallParser


class CallArrayParser(ToolCallParser):
    """Finds arrays of calls."""

    def __init__(self, start_tag: str = "") -> None:
        super().__init__(start_tag)
        self._is_in_array = False

    def _begin_array(self, text: str) -> str:
        """Read the opening bracket, which the text begins with."""
        self._call_text.append(text[0])
        self._is_in_array = True
        self._state = self._read_item
        return text[1:]

    def _read_item(self, text: str) -> str:
        begun = text.lstrip(WHITESPACE)
        self._call_text.append(text[: len(text) - len(begun)])
        if begun.startswith("{"):
            self._begin_call(CallObjectReader())
        elif begun:
            self._is_in_array = False
            self._break_call()
        return begun

    def _after_call(self, text: str) -> str:
        """Read what follows an item: a comma, or the closing bracket."""
        rest = text.lstrip(WHITESPACE)
        if rest.startswith(","):
            self._state = self._read_item
            return rest[1:]
        if rest:
            self._is_in_array = False
            self._state = self._read_content
        return rest.removeprefix("]")

    def _break_call(self) -> None:
        self._is_in_array = False
        super()._break_call()
