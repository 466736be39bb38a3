"""Removes from a JSON body the fields that its schema does not have, at any depth."""

import msgspec
from msgspec import inspect

Shape = dict[str, "Shape | None"]  # the fields of an object, and the shape of the objects in each


def shape_of(kind: type[msgspec.Struct]) -> Shape:
    """The fields of `kind`, and of the structs in its fields."""
    return _shape(inspect.type_info(kind)) or {}


def without_unknown_fields(body: bytes, shape: Shape) -> tuple[bytes, int]:
    """Return the body again and how many fields were removed. Raises msgspec.DecodeError."""
    value = msgspec.json.decode(body)
    removed = _remove(value, shape)
    return msgspec.json.encode(value), removed


def _shape(info: inspect.Type) -> Shape | None:
    match info:
        case inspect.StructType(fields=fields):
            return {field.encode_name: _shape(field.type) for field in fields}
        case inspect.ListType(item_type=item):
            return _shape(item)
        case inspect.UnionType(types=types):
            return next((shape for each in types if (shape := _shape(each)) is not None), None)
        case inspect.Metadata(type=inner):
            return _shape(inner)
        case _:
            return None


def _remove(value: object, shape: Shape | None) -> int:
    if shape is None:
        return 0
    if isinstance(value, list):
        return sum(_remove(item, shape) for item in value)
    if not isinstance(value, dict):
        return 0
    unknown = value.keys() - shape.keys()
    for name in unknown:
        del value[name]
    return len(unknown) + sum(_remove(inner, shape[name]) for name, inner in value.items())
