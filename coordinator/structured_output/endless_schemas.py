"""Finds JSON schemas that no finite value satisfies, such as an object that requires another of its
own kind.

The grammar of such a schema allows a next token at every position, so that its outputs never end.
References are assumed to be endless until a value that ends is found for them: a least fixed point,
as for the symbols of a grammar that derive a text.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Any  # a JSON value

_INDEX = re.compile("[0-9]{1,9}")  # of a list, in a JSON pointer


def find_endless_reference(root: Schema) -> str | None:
    """Return a local reference whose values cannot end, if the values of `root` cannot."""
    endless = set(_list_references(root))
    while True:
        found = {
            reference
            for reference in endless
            if _has_finite_value(_resolve_reference(root, reference), endless)
        }
        if not found:
            break
        endless -= found
    if not endless or _has_finite_value(root, endless):
        return None
    return min(endless)


def _has_finite_value(schema: Schema, endless: set[str]) -> bool:
    """Whether a value satisfies `schema` and ends, as far as this can be seen from its keywords."""
    if not isinstance(schema, Mapping):
        return True
    if schema.get("$ref") in endless:
        return False
    for keyword in ("anyOf", "oneOf"):
        choices = schema.get(keyword)
        if isinstance(choices, list) and choices:
            if not any(_has_finite_value(choice, endless) for choice in choices):
                return False
    parts = schema.get("allOf")
    if isinstance(parts, list) and not all(_has_finite_value(part, endless) for part in parts):
        return False
    return all(_has_finite_value(part, endless) for part in _list_needed_parts(schema))


def _list_needed_parts(schema: Mapping[str, Schema]) -> Iterator[Schema]:
    """Yield the schemas of the values that every value of `schema` contains."""
    kinds = schema.get("type")
    if kinds in ("object", ["object"]):
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, Mapping) and isinstance(required, list):
            yield from (properties[name] for name in required if _is_key(name, properties))
    if kinds in ("array", ["array"]):
        least, first = schema.get("minItems"), schema.get("prefixItems")
        begun = first if isinstance(first, list) else []
        if isinstance(least, int):
            yield from begun[:least]
            if least > len(begun):
                yield schema.get("items")


def _is_key(name: Schema, properties: Mapping[str, Schema]) -> bool:
    return isinstance(name, str) and name in properties


def _list_references(schema: Schema) -> Iterator[str]:
    if isinstance(schema, Mapping):
        reference = schema.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            yield reference
        for value in schema.values():
            yield from _list_references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _list_references(value)


def _resolve_reference(root: Schema, reference: str) -> Schema:
    """Follow a JSON pointer. What it does not find is left to the compiler: true."""
    found = root
    for escaped in reference.removeprefix("#").split("/")[1:]:
        name = escaped.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, list) and _INDEX.fullmatch(name) and int(name) < len(found):
            found = found[int(name)]
        else:
            return True
    return found
