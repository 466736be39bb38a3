"""Tool calls of Mistral models, in both of their formats.

`[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, ...]`, and since their tokenizer of version 11
`[TOOL_CALLS]f[ARGS]{"x": 1}` for each call, where `[CALL_ID]` and an id may come before `[ARGS]`.
"""

import re

from coordinator.text.output_parsers.call_array import CallArrayParser
from coordinator.text.output_parsers.call_reader import (
    MAX_NAME_CHARACTERS,
    ArgumentsReader,
    CallObjectReader,
)
from coordinator.text.output_parsers.tool_calls import WHITESPACE

START_TAG = "[TOOL_CALLS]"
CALL_ID_TAG = "[CALL_ID]"
ARGUMENTS_TAG = "[ARGS]"
_MAX_HEAD_CHARACTERS = MAX_NAME_CHARACTERS + 128
_WORD = r"[^\s\[\]{}]+"
_HEAD = re.compile(
    rf"(?P<name>{_WORD})\s*(?:{re.escape(CALL_ID_TAG)}\s*{_WORD}\s*)?"
    rf"(?:{re.escape(ARGUMENTS_TAG)}\s*)?"
)


class MistralParser(CallArrayParser):
    def __init__(self) -> None:
        super().__init__(START_TAG)
        self._head = ""  # what is read between the start tag and the arguments

    def _on_start_tag(self, text: str) -> str:
        begun = text.lstrip(WHITESPACE)
        self._call_text.append(text[: len(text) - len(begun)])
        if not begun:
            return ""
        if begun[0] == "[":
            return self._begin_array(begun)
        if begun[0] == "{":
            self._begin_call(CallObjectReader())
        else:
            self._head = ""
            self._state = self._read_head
        return begun

    def _read_head(self, text: str) -> str:
        """Read the name of the function up to its arguments."""
        for place, character in enumerate(text):
            if character == "{":
                head = _HEAD.fullmatch(self._head)
                if head is None:
                    break
                self._begin_call(ArgumentsReader(head["name"][:MAX_NAME_CHARACTERS]))
                return text[place:]
            if character == "\n" or len(self._head) == _MAX_HEAD_CHARACTERS:
                break
            self._head += character
            self._call_text.append(character)
        else:
            return ""
        self._break_call()
        return text[place:]

    def _after_call(self, text: str) -> str:
        if self._is_in_array:
            return super()._after_call(text)
        self._state = self._read_content
        return text
