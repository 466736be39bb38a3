"""Finds the part of a JSON schema that an error of the compiler is about.

The compiler names what is wrong, but not where. A part that fails with the same error by itself is
where it is, and the smallest such part is told to the client.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

_DEFINITIONS = ("$defs", "definitions")
_SCHEMAS_BY_NAME = (*_DEFINITIONS, "properties", "patternProperties")
_LISTS_OF_SCHEMAS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SCHEMAS = ("items", "additionalProperties")


def locate_error(root: Schema, fails: Callable[[Schema], bool], max_trials: int) -> str:
    """Return a JSON pointer to the smallest part of `root` that fails, "" for `root` itself.

    `fails` says whether a schema has the error of `root`; it is called at most `max_trials` times.
    """
    definitions = {name: root[name] for name in _DEFINITIONS if name in root}
    pointer, parts = "", _list_parts(root)
    for _ in range(max_trials):
        place, part = next(parts, ("", None))
        if part is None:
            break
        if fails({**definitions, **part}):
            pointer += place
            parts = _list_parts(part)
    return pointer


def _list_parts(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield the schemas in a schema, with their pointers from there. Definitions come first."""
    for keyword in _SCHEMAS_BY_NAME:
        named = schema.get(keyword)
        if isinstance(named, Mapping):
            for name, part in named.items():
                escaped = str(name).replace("~", "~0").replace("/", "~1")
                yield from _as_part(f"/{keyword}/{escaped}", part)
    for keyword in _LISTS_OF_SCHEMAS:
        listed = schema.get(keyword)
        if isinstance(listed, list):
            for index, part in enumerate(listed):
                yield from _as_part(f"/{keyword}/{index}", part)
    for keyword in _SCHEMAS:
        yield from _as_part(f"/{keyword}", schema.get(keyword))


def _as_part(pointer: str, part: object) -> Iterator[tuple[str, Schema]]:
    if isinstance(part, Mapping):
        yield pointer, part
