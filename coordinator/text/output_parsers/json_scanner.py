"""Recognises one JSON value, fed character by character (RFC 8259)."""

import enum
import re
from collections.abc import Callable

MAX_DEPTH = 128  # objects and arrays in one another
_MAX_SCALAR_CHARACTERS = 1024  # of a number
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null", re.ASCII)
_SCALAR_STARTS = frozenset("-0123456789tfn")
_SCALAR_CHARACTERS = frozenset("+-.0123456789eEtrufalsn")
_WHITESPACE = frozenset(" \t\n\r")
_ESCAPES = frozenset('"\\/bfnrtu')
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")


class Progress(enum.Enum):
    """What a character did to the value that it was fed to."""

    MORE = enum.auto()  # the value goes on
    DONE = enum.auto()  # the value is complete with this character
    ENDED = enum.auto()  # the value was complete before this character, which is not part of it
    INVALID = enum.auto()  # no JSON value begins like this


class _Expected(enum.Enum):
    VALUE = enum.auto()
    VALUE_OR_END = enum.auto()
    KEY = enum.auto()
    KEY_OR_END = enum.auto()
    COLON = enum.auto()
    COMMA_OR_END = enum.auto()


class JsonScanner:
    """The state of one value. Only a number or a literal outside of an object can be ENDED."""

    def __init__(self) -> None:
        self._expected = _Expected.VALUE
        self._closers: list[str] = []  # of the open objects and arrays
        self._scalar = ""  # characters of an unfinished number or literal
        self._feed_special: Callable[[str], Progress] | None = None  # inside a string
        self._is_key = False  # of an unfinished string
        self._hex_digits_left = 0

    def feed_character(self, character: str) -> Progress:
        if self._feed_special is not None:
            return self._feed_special(character)
        if self._scalar:
            if character in _SCALAR_CHARACTERS and len(self._scalar) < _MAX_SCALAR_CHARACTERS:
                self._scalar += character
                return Progress.MORE
            if not _SCALAR.fullmatch(self._scalar):
                return Progress.INVALID
            self._scalar = ""
            if not self._closers:
                return Progress.ENDED
            self._expected = _Expected.COMMA_OR_END
        if character in _WHITESPACE:
            return Progress.MORE
        return self._feed_structure(character)

    def _feed_structure(self, character: str) -> Progress:
        match self._expected:
            case _Expected.VALUE:
                return self._begin_value(character)
            case _Expected.VALUE_OR_END:
                return self._close() if character == "]" else self._begin_value(character)
            case _Expected.KEY_OR_END if character == "}":
                return self._close()
            case _Expected.KEY | _Expected.KEY_OR_END if character == '"':
                return self._begin_string(is_key=True)
            case _Expected.COLON if character == ":":
                self._expected = _Expected.VALUE
                return Progress.MORE
            case _Expected.COMMA_OR_END if character == self._closers[-1]:
                return self._close()
            case _Expected.COMMA_OR_END if character == ",":
                in_object = self._closers[-1] == "}"
                self._expected = _Expected.KEY if in_object else _Expected.VALUE
                return Progress.MORE
        return Progress.INVALID

    def _begin_value(self, character: str) -> Progress:
        if character in "{[":
            if len(self._closers) == MAX_DEPTH:
                return Progress.INVALID
            is_object = character == "{"
            self._closers.append("}" if is_object else "]")
            self._expected = _Expected.KEY_OR_END if is_object else _Expected.VALUE_OR_END
            return Progress.MORE
        if character == '"':
            return self._begin_string(is_key=False)
        if character in _SCALAR_STARTS:
            self._scalar = character
            return Progress.MORE
        return Progress.INVALID

    def _begin_string(self, *, is_key: bool) -> Progress:
        self._is_key = is_key
        self._feed_special = self._feed_string
        return Progress.MORE

    def _feed_string(self, character: str) -> Progress:
        if character == "\\":
            self._feed_special = self._feed_escape
        elif character == '"':
            self._feed_special = None
            if not self._is_key:
                return self._end_value()
            self._expected = _Expected.COLON
        elif character < " ":
            return Progress.INVALID
        return Progress.MORE

    def _feed_escape(self, character: str) -> Progress:
        if character not in _ESCAPES:
            return Progress.INVALID
        self._hex_digits_left = 4
        self._feed_special = self._feed_hex if character == "u" else self._feed_string
        return Progress.MORE

    def _feed_hex(self, character: str) -> Progress:
        if character not in _HEX_DIGITS:
            return Progress.INVALID
        self._hex_digits_left -= 1
        if not self._hex_digits_left:
            self._feed_special = self._feed_string
        return Progress.MORE

    def _close(self) -> Progress:
        self._closers.pop()
        return self._end_value()

    def _end_value(self) -> Progress:
        self._expected = _Expected.COMMA_OR_END
        return Progress.MORE if self._closers else Progress.DONE
