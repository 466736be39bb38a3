"""Tool calls of Hermes and Qwen models.

`<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`, once for each call.
"""

from coordinator.text.output_parsers.call_reader import CallObjectReader
from coordinator.text.output_parsers.tool_calls import WHITESPACE, ToolCallParser

START_TAG = "<tool_call>"
END_TAG = "</tool_call>"


class HermesParser(ToolCallParser):
    def __init__(self) -> None:
        super().__init__(START_TAG)
        self._end = ""  # what is read of the end tag

    def _on_start_tag(self, text: str) -> str:
        self._begin_call(CallObjectReader())
        return text

    def _after_call(self, text: str) -> str:
        """Skip the end tag, or as much of it as the output has."""
        if not self._end:
            text = text.lstrip(WHITESPACE)
        read = self._end + text
        if len(read) < len(END_TAG) and END_TAG.startswith(read):
            self._end = read
            return ""
        self._end = ""
        self._state = self._read_content
        return read.removeprefix(END_TAG)
