"""The schema that a forced call is constrained by, references of its own among it."""

import json
from typing import Any

import jsonschema
import pytest

from coordinator.frontend.tool_use import ToolUse, build_output_schema

TREE = {
    "type": "object",
    "properties": {
        "item": {"$ref": "#/$defs/Item"},
        "parent": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["item"],
    "$defs": {"Item": {"type": "integer"}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "put", "parameters": TREE}},
    {"type": "function", "function": {"name": "list"}},
]


def is_allowed(use: ToolUse, output: str) -> bool:
    schema = build_output_schema(use)
    assert schema is not None
    jsonschema.Draft202012Validator.check_schema(schema)
    return bool(jsonschema.Draft202012Validator(schema).is_valid(json.loads(output)))


@pytest.mark.parametrize(
    ("output", "allowed"),
    [
        ('[{"name": "put", "parameters": {"item": 1}}]', True),
        ('[{"name": "put", "parameters": {"item": 1, "parent": {"item": 2}}}]', True),
        ('[{"name": "put", "parameters": {"item": 1, "parent": {"item": "x"}}}]', False),
        ('[{"name": "put", "parameters": {"item": "x"}}]', False),
        ('[{"name": "list", "parameters": {}}]', True),
        ('[{"name": "list", "parameters": {"x": 1}}]', False),
        ('[{"name": "drop", "parameters": {}}]', False),
        ('[{"name": "list"}]', False),
        ("[]", False),
    ],
)
def test_required_calls_follow_the_schemas(output: str, allowed: bool) -> None:
    assert is_allowed(ToolUse(TOOLS, "required"), output) == allowed


def test_number_of_calls_without_parallel_ones() -> None:
    two = json.dumps([{"name": "list", "parameters": {}}] * 2)
    assert is_allowed(ToolUse(TOOLS, "required"), two)
    assert not is_allowed(ToolUse(TOOLS, "required", is_parallel=False), two)


def test_named_call_is_the_arguments_alone() -> None:
    assert build_output_schema(ToolUse(TOOLS, "named", "put")) == TREE
    assert is_allowed(ToolUse(TOOLS, "named", "list"), "{}")


def test_model_that_chooses_is_free() -> None:
    assert build_output_schema(ToolUse(TOOLS, "auto")) is None


def test_arguments_are_objects_where_the_schema_does_not_say_it() -> None:
    for parameters, expected in (
        ({"properties": {"x": {}}}, {"type": "object", "properties": {"x": {}}}),
        ({"anyOf": [TREE, TREE]}, {"anyOf": [TREE, TREE]}),
    ):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        assert build_output_schema(ToolUse([tool], "named", "f")) == expected
