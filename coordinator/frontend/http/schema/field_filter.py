"""Removes from a JSON body the fields that its schema does not have, at any depth."""

import msgspec
from msgspec import inspect

# The fields of an object, each with the tree of the objects in it.
FieldTree = dict[str, "FieldTree | None"]


def build_field_tree(kind: type[msgspec.Struct]) -> FieldTree:
    """Return the fields of a struct type, and of the structs in its fields."""
    return _field_tree_of(inspect.type_info(kind)) or {}


def remove_unknown_fields(body: bytes, shape: FieldTree) -> tuple[bytes, int]:
    """Return the body without unknown fields, and their number. Raises msgspec.DecodeError."""
    value = msgspec.json.decode(body)
    removed = _remove_from_value(value, shape)
    return msgspec.json.encode(value), removed


def _field_tree_of(info: inspect.Type) -> FieldTree | None:
    match info:
        case inspect.StructType(fields=fields):
            return {field.encode_name: _field_tree_of(field.type) for field in fields}
        case inspect.ListType(item_type=item):
            return _field_tree_of(item)
        case inspect.UnionType(types=types):
            return next(
                (shape for each in types if (shape := _field_tree_of(each)) is not None), None
            )
        case inspect.Metadata(type=inner):
            return _field_tree_of(inner)
        case _:
            return None


def _remove_from_value(value: object, shape: FieldTree | None) -> int:
    if shape is None:
        return 0
    if isinstance(value, list):
        return sum(_remove_from_value(item, shape) for item in value)
    if not isinstance(value, dict):
        return 0
    unknown = value.keys() - shape.keys()
    for name in unknown:
        del value[name]
    return len(unknown) + sum(
        _remove_from_value(inner, shape[name]) for name, inner in value.items()
    )
