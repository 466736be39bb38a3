"""Schemas that no finite value satisfies are found, and no others."""

from typing import Any

import pytest

from coordinator.structured_output.endless_schemas import find_endless_reference
from tests.structured.public_schemas import draw_schemas

NODE = {"$ref": "#/$defs/node"}


def tree(**node: Any) -> dict[str, Any]:
    """A schema that refers to the definition of a node."""
    return {"type": "array", "minItems": 1, "items": NODE, "$defs": {"node": node}}


def object_with(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


ENDLESS = {
    "itself": tree(**NODE),
    "property": tree(**object_with(next=NODE)),
    "item": tree(type="array", minItems=1, items=NODE),
    "first_item": tree(type=["array"], minItems=1, prefixItems=[NODE]),
    "every_choice": tree(anyOf=[object_with(a=NODE), object_with(b=object_with(c=NODE))]),
    "one_part": tree(allOf=[{"type": "object"}, object_with(a=NODE)]),
    "in_turn": {
        "$ref": "#/$defs/a~1b",
        "$defs": {
            "a/b": object_with(x={"$ref": "#/$defs/c"}),
            "c": object_with(x={"$ref": "#/$defs/a~1b"}),
        },
    },
}
FINITE = {
    "no_reference": object_with(a={"type": "integer"}),
    "optional": tree(type="object", properties={"next": NODE}),
    "no_items": tree(type="array", items=NODE),
    "another_choice": tree(anyOf=[object_with(a=NODE), {"type": "null"}]),
    "another_type": tree(type=["object", "null"], properties={"a": NODE}, required=["a"]),
    "unused": {"type": "integer", "$defs": {"node": object_with(a=NODE)}},
    "unknown": {"$ref": "#/$defs/missing"},
    "remote": {"$ref": "http://127.0.0.1/x"},
    "odd": {"type": "object", "required": [1, {}], "properties": 5, "anyOf": 3, "$ref": ["#"]},
    "boolean": True,
}


@pytest.mark.parametrize("case", ENDLESS)
def test_endless_schemas_are_found(case: str) -> None:
    reference = find_endless_reference(ENDLESS[case])
    assert reference is not None
    assert reference.startswith("#/$defs/")


@pytest.mark.parametrize("case", FINITE)
def test_finite_schemas_are_left_alone(case: str) -> None:
    assert find_endless_reference(FINITE[case]) is None


@pytest.mark.parametrize("index", ["²", "٣", "1", "9" * 5000, "-1", ""])
def test_reference_to_no_item_of_a_list_is_left_alone(index: str) -> None:
    assert find_endless_reference({"$ref": f"#/anyOf/{index}", "anyOf": [{}]}) is None


def test_public_schemas_are_left_alone() -> None:
    """All of them have instances."""
    found = [
        schema.name
        for schema in draw_schemas(0)
        if find_endless_reference(schema.schema) is not None
    ]
    assert found == []
