"""Refusals of JSON schemas say which part of the schema they are about."""

import json
from functools import cache
from typing import Any

import pytest
from llguidance import LLTokenizer

from baton.types import GrammarKind, StructuredOutput
from coordinator.structured_output.compile_worker import judge_grammar
from coordinator.structured_output.error_location import locate_error
from tests.small_tokenizers import byte_level_tokenizer

WRONG: dict[str, Any] = {"type": "strin"}
CASES: list[tuple[dict[str, Any], str]] = [
    (WRONG, "Invalid type: strin"),
    (
        {"properties": {"a": {"type": "array", "items": WRONG}, "b": {}}},
        "Invalid type: strin (at #/properties/a/items)",
    ),
    (
        {"anyOf": [{"type": "null"}, {"prefixItems": [{}, WRONG]}]},
        "Invalid type: strin (at #/anyOf/1/prefixItems/1)",
    ),
    (
        {
            "properties": {"a": {"$ref": "#/$defs/T"}},
            "$defs": {"T": {"properties": {"b/c": {"uniqueItems": True}}}},
        },
        'Unimplemented keys: ["uniqueItems"] (at #/$defs/T/properties/b~1c)',
    ),
    (
        {"properties": {"a": {"items": {"$ref": "#/$defs/x"}}}},
        "Pointer '/$defs/x' does not exist (at #/properties/a/items)",
    ),
    (
        {
            "properties": {"a": {"additionalProperties": {"$ref": "#/definitions/x"}}},
            "definitions": {"y": {}},
        },
        "Pointer '/definitions/x' does not exist (at #/properties/a/additionalProperties)",
    ),
]


@cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer(byte_level_tokenizer().to_str())


@pytest.mark.parametrize(("schema", "error"), CASES, ids=lambda case: str(case)[:60])
def test_errors_have_a_place(schema: dict[str, Any], error: str) -> None:
    grammar = StructuredOutput(GrammarKind.JSON, json.dumps(schema))
    assert judge_grammar(tokenizer(), grammar)[0] == error


def test_the_search_is_bounded() -> None:
    schema: dict[str, Any] = {"properties": {str(number): {} for number in range(100)}}
    tried = []

    def fails(part: object) -> bool:
        tried.append(part)
        return False

    assert locate_error(schema, fails, 7) == ""
    assert len(tried) == 7
    nested: dict[str, Any] = {}
    for _ in range(50):
        nested = {"items": nested}
    assert locate_error(nested, lambda part: True, 20) == "/items" * 20
