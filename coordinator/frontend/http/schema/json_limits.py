"""Bounds the size of a JSON body before it is decoded, and rejects duplicate names.

A decoder holds Python's lock until it is done, so the number of objects is bounded in advance. Both
checks look at bytes alone, with escapes blanked, so that every quote begins or ends a string.
"""

import re
from typing import NoReturn

import msgspec

from baton.errors import InvalidRequest
from baton.limits import MAX_JSON_CONTAINERS, MAX_JSON_KEYS, MAX_JSON_STRINGS, MAX_JSON_VALUES

# Shorter bodies cannot exceed the bounds, because every item takes at least two bytes.
_ALWAYS_WITHIN_BYTES = 2 * min(MAX_JSON_CONTAINERS, MAX_JSON_KEYS)
_NAMES_AND_BRACES = re.compile(rb'"([^"]*)"(\s*:)?|[{}]')
_MAX_SHOWN_CHARS = 64  # characters of a name


def blank_escapes(body: bytes) -> bytes:
    """Overwrite escaped quotes and backslashes without changing the length of the body."""
    return body.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in body else body


def check_json_size(plain: bytes) -> None:
    """Raises InvalidRequest for too many names, strings, objects, arrays or values.

    `plain` is the body without escapes.
    """
    if len(plain) < _ALWAYS_WITHIN_BYTES:
        return
    strings = plain.count(b'"') // 2
    if strings > MAX_JSON_STRINGS:
        _raise_too_many(strings, "strings", MAX_JSON_STRINGS)
    structure = b"".join(plain.split(b'"')[::2])
    names, containers = structure.count(b":"), structure.count(b"{") + structure.count(b"[")
    if names > MAX_JSON_KEYS:
        _raise_too_many(names, "names", MAX_JSON_KEYS)
    if containers > MAX_JSON_CONTAINERS:
        _raise_too_many(containers, "objects and arrays", MAX_JSON_CONTAINERS)
    values = structure.count(b",")
    if values > MAX_JSON_VALUES:
        _raise_too_many(values, "values", MAX_JSON_VALUES)


def check_duplicate_names(body: bytes, plain: bytes) -> None:
    """Raises InvalidRequest for a name that an object has twice, because JSON parsers differ.

    `body` is valid JSON, and `plain` is the body without escapes.
    """
    if plain.count(b":") < 2:
        return
    objects: list[set[bytes | str]] = []  # names of each enclosing object
    for match in _NAMES_AND_BRACES.finditer(plain):
        if match.lastindex == 2:
            name = _normalize_name(body[match.start(1) : match.end(1)])
            if name in objects[-1]:
                shown = name if isinstance(name, str) else name.decode()
                shown = (
                    shown
                    if len(shown) <= _MAX_SHOWN_CHARS
                    else shown[: _MAX_SHOWN_CHARS - 3] + "..."
                )
                raise InvalidRequest(f"{shown} is given twice", param=shown)
            objects[-1].add(name)
        elif match.lastindex is None:
            if plain[match.start()] == 0x7B:
                objects.append(set())
            else:
                objects.pop()


def _normalize_name(written: bytes) -> bytes | str:
    """Return the same value for all spellings of a name."""
    if b"\\" not in written:
        return written
    read = msgspec.json.decode(b'"%b"' % written, type=str)
    plain = msgspec.json.encode(read)[1:-1]
    return read if b"\\" in plain else plain


def _raise_too_many(count: int, items: str, limit: int) -> NoReturn:
    raise InvalidRequest(f"the body has {count} {items}: at most {limit}")
