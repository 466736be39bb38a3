"""Reads one tool call, fed character by character, and gives its arguments out as they arrive."""

import json
from collections.abc import Callable
from typing import Protocol

from coordinator.text.output_parsers.json_scanner import JsonScanner, Progress

MAX_NAME_CHARACTERS = 256
_WHITESPACE = frozenset(" \t\n\r")
_ARGUMENT_KEYS = ("arguments", "parameters")


class CallReader(Protocol):
    """Reads one call of some format."""

    name: str | None  # once the call is certain enough to be announced

    def feed_character(self, character: str) -> Progress: ...

    def take_arguments(self) -> str:
        """Return the text of the arguments that is new since the last call."""
        ...


class ArgumentsReader:
    """Reads the arguments alone, a JSON object, of a function whose name is known."""

    def __init__(self, name: str) -> None:
        self._known_name = name
        self.name: str | None = None
        self._scanner = JsonScanner()
        self._text: list[str] = []

    def feed_character(self, character: str) -> Progress:
        if self.name is None:
            if character in _WHITESPACE:
                return Progress.MORE
            if character != "{":
                return Progress.INVALID
            self.name = self._known_name
        progress = self._scanner.feed_character(character)
        if progress in (Progress.MORE, Progress.DONE):
            self._text.append(character)
        return progress

    def take_arguments(self) -> str:
        text = "".join(self._text)
        self._text.clear()
        return text


class CallObjectReader:
    """Reads an object with the name of a function and its arguments, in either order.

    `{"name": "f", "arguments": {"x": 1}}`; the key `parameters` means the same as `arguments`.
    Arguments may be a JSON object, a string that has one, or null. Other members are skipped,
    unless `allowed_keys` is given: then any other key makes the object something else.
    """

    def __init__(
        self, *, allowed_keys: frozenset[str] | None = None, needs_arguments: bool = False
    ) -> None:
        self.name: str | None = None  # once the arguments begin
        self._allowed_keys = allowed_keys
        self._needs_arguments = needs_arguments
        self._feed: Callable[[str], Progress] = self._feed_opening
        self._scanner = JsonScanner()
        self._key = ""
        self._value: list[str] = []  # of the key or value that is being read
        self._keys: set[str] = set()
        self._read_name: str | None = None
        self._arguments: list[str] = []  # not yet taken
        self._has_arguments = False

    def feed_character(self, character: str) -> Progress:
        return self._feed(character)

    def take_arguments(self) -> str:
        if self.name is None:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _feed_opening(self, character: str) -> Progress:
        if character in _WHITESPACE:
            return Progress.MORE
        self._feed = self._feed_first_key
        return Progress.MORE if character == "{" else Progress.INVALID

    def _feed_first_key(self, character: str) -> Progress:
        return self._end_object() if character == "}" else self._feed_next_key(character)

    def _feed_next_key(self, character: str) -> Progress:
        if character in _WHITESPACE:
            return Progress.MORE
        if character != '"':
            return Progress.INVALID
        self._begin(self._feed_key)
        return self._feed_key(character)

    def _begin(self, feed: Callable[[str], Progress]) -> None:
        self._scanner, self._value, self._feed = JsonScanner(), [], feed

    def _feed_key(self, character: str) -> Progress:
        self._value.append(character)
        progress = self._scanner.feed_character(character)
        if progress is not Progress.DONE:
            return progress
        key = json.loads("".join(self._value))
        if _ARGUMENT_KEYS[1] == key:
            key = _ARGUMENT_KEYS[0]
        is_allowed = self._allowed_keys is None or key in self._allowed_keys
        if key in self._keys or not is_allowed:
            return Progress.INVALID
        self._keys.add(key)
        self._key = key
        self._feed = self._feed_colon
        return Progress.MORE

    def _feed_colon(self, character: str) -> Progress:
        if character in _WHITESPACE:
            return Progress.MORE
        self._feed = self._feed_value_start
        return Progress.MORE if character == ":" else Progress.INVALID

    def _feed_value_start(self, character: str) -> Progress:
        if character in _WHITESPACE:
            return Progress.MORE
        is_object = self._key == _ARGUMENT_KEYS[0] and character == "{"
        self._begin(self._feed_arguments if is_object else self._feed_value)
        if is_object:
            self._has_arguments = True
            self.name = self._read_name
        return self._feed(character)

    def _feed_arguments(self, character: str) -> Progress:
        progress = self._scanner.feed_character(character)
        if progress is not Progress.INVALID:
            self._arguments.append(character)
        if progress is Progress.DONE:
            self._feed = self._feed_comma
            return Progress.MORE
        return progress

    def _feed_value(self, character: str) -> Progress:
        progress = self._scanner.feed_character(character)
        if progress in (Progress.MORE, Progress.DONE):
            self._value.append(character)
        if progress in (Progress.MORE, Progress.INVALID):
            return progress
        if not self._accept_value("".join(self._value)):
            return Progress.INVALID
        self._feed = self._feed_comma
        return Progress.MORE if progress is Progress.DONE else self._feed_comma(character)

    def _accept_value(self, text: str) -> bool:
        """Whether a call may have this value of the present key."""
        if self._key == "name":
            self._read_name = _decode_string(text)
            if not self._read_name or len(self._read_name) > MAX_NAME_CHARACTERS:
                return False
            if self._has_arguments:
                self.name = self._read_name
        elif self._key == _ARGUMENT_KEYS[0]:
            arguments = "{}" if text == "null" else _decode_string(text)
            if arguments is None or not _is_object(arguments):
                return False
            self._has_arguments = True
            self._arguments.append(arguments)
            self.name = self._read_name
        return True

    def _feed_comma(self, character: str) -> Progress:
        if character in _WHITESPACE:
            return Progress.MORE
        if character == ",":
            self._feed = self._feed_next_key
            return Progress.MORE
        return self._end_object() if character == "}" else Progress.INVALID

    def _end_object(self) -> Progress:
        if self._read_name is None or (self._needs_arguments and not self._has_arguments):
            return Progress.INVALID
        if not self._has_arguments:
            self._arguments.append("{}")
        self.name = self._read_name
        return Progress.DONE


def _decode_string(text: str) -> str | None:
    """Return the text of a JSON string that can be sent as UTF-8, None for any other value."""
    if not text.startswith('"'):
        return None
    decoded: str = json.loads(text)
    return decoded if decoded.isascii() or _is_encodable(decoded) else None


def _is_encodable(text: str) -> bool:
    """Whether the text has no half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _is_object(text: str) -> bool:
    """Whether the text is one JSON object, and nothing else but whitespace around it."""
    stripped = text.strip(" \t\n\r")
    if not stripped.startswith("{"):
        return False
    scanner = JsonScanner()
    for place, character in enumerate(stripped):
        progress = scanner.feed_character(character)
        if progress is not Progress.MORE:
            return progress is Progress.DONE and place == len(stripped) - 1
    return False
