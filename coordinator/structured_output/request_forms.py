"""The forms in which clients ask for structured output, as one `StructuredOutput`.

HTTP and gRPC read their own messages and call these functions, so that equal requests have equal
texts and compile once.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from baton.errors import InvalidRequest
from baton.limits import check_grammar_size
from baton.types import GrammarKind, StructuredOutput

# Of a schema: options of the compiler, which clients set by other fields.
_OPTIONS_KEY = "x-guidance"
_ANY_OBJECT = {"type": "object"}


def json_object_output() -> StructuredOutput:
    """Any JSON object."""
    return json_schema_output(_ANY_OBJECT)


def json_schema_output(
    schema: object, *, compact: bool = False, closed: bool = False, whitespace_pattern: str = ""
) -> StructuredOutput:
    """JSON that a schema allows; the schema may be given as text. Raises InvalidRequest.

    `compact`: without spaces between values. `closed`: objects have no properties but those that
    the schema names. `whitespace_pattern` is a regular expression of what may be between values.
    """
    if isinstance(schema, str):
        schema = _decode(schema)
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(
            "structured_output: the schema must be an object or a boolean",
            param="structured_output",
        )
    if isinstance(schema, dict):
        schema = {name: value for name, value in schema.items() if name != _OPTIONS_KEY}
    elif schema:
        schema = {}
    if closed:
        schema = _close_objects(schema)
    if isinstance(schema, dict) and (compact or whitespace_pattern):
        options: dict[str, object] = {"whitespace_flexible": not compact}
        if whitespace_pattern:
            options["whitespace_pattern"] = whitespace_pattern
        schema[_OPTIONS_KEY] = options
    return _make_output(GrammarKind.JSON, _encode(schema))


def choice_output(choices: Sequence[str]) -> StructuredOutput:
    """One of several texts. Raises InvalidRequest."""
    if not choices:
        raise InvalidRequest(
            "structured_output: choice is empty: it needs at least one text",
            param="structured_output",
        )
    return _make_output(GrammarKind.CHOICE, _encode(list(choices)))


def regex_output(pattern: str) -> StructuredOutput:
    """A text that the whole of a regular expression matches. Raises InvalidRequest."""
    return _make_output(GrammarKind.REGEX, pattern)


def grammar_output(text: str) -> StructuredOutput:
    """A text of a context-free grammar, in Lark or GBNF. Raises InvalidRequest."""
    return _make_output(GrammarKind.GRAMMAR, text)


def structural_tag_output(tags: object) -> StructuredOutput:
    """A text with tags in it, as JSON or as text of JSON. Raises InvalidRequest."""
    text = tags if isinstance(tags, str) else _encode(tags)
    return _make_output(GrammarKind.STRUCTURAL_TAG, text)


def _make_output(kind: GrammarKind, text: str) -> StructuredOutput:
    check_grammar_size(text)
    return StructuredOutput(kind, text)


def _encode(value: object) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise InvalidRequest(
            "structured_output is nested too deeply", param="structured_output"
        ) from None


def _decode(text: str) -> Any:
    check_grammar_size(text)
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(
            f"structured_output: the schema is not JSON: {error}", param="structured_output"
        ) from None


def _close_objects(value: Any) -> Any:
    """Return a schema in which objects that name their properties have no others."""
    if isinstance(value, list):
        return [_close_objects(item) for item in value]
    if not isinstance(value, dict):
        return value
    closed = {name: _close_objects(item) for name, item in value.items()}
    if "properties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed
