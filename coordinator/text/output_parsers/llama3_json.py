"""Tool calls of Llama 3 models: the whole answer is `{"name": "f", "parameters": {"x": 1}}`.

Several calls are separated by semicolons. The token `<|python_tag|>` may come before a call. An
answer that begins with anything else is content, up to that token.
"""

from coordinator.text.output_parsers.call_reader import CallObjectReader
from coordinator.text.output_parsers.tool_calls import WHITESPACE, ToolCallParser

START_TAG = "<|python_tag|>"
_SEPARATORS = WHITESPACE + ";"
# An object with other keys is an answer in JSON.
_CALL_KEYS = frozenset({"type", "id", "name", "arguments"})


class Llama3JsonParser(ToolCallParser):
    def __init__(self) -> None:
        super().__init__(START_TAG)
        self._state = self._read_call_or_content

    def _read_call_or_content(self, text: str) -> str:
        """Read what begins the answer or follows a call."""
        begun = text.lstrip(WHITESPACE)
        self._add_content(text[: len(text) - len(begun)])
        if begun.startswith("{"):
            return self._on_start_tag(begun)
        if begun:
            self._state = self._read_content
        return begun

    def _on_start_tag(self, text: str) -> str:
        self._begin_call(CallObjectReader(allowed_keys=_CALL_KEYS, needs_arguments=True))
        return text

    def _after_call(self, text: str) -> str:
        rest = text.lstrip(_SEPARATORS)
        if rest:
            self._state = self._read_call_or_content
        return rest
