"""Protobuf messages as JSON values, with the .proto field names and numbers as numbers."""

from typing import Any

from google.protobuf.message import Message


def message_to_dict(message: Message) -> dict[str, Any]:
    """Return every field of `message`, set or not.

    Protobuf's own JSON is not used because it writes 64-bit numbers as strings.
    """
    return {
        field.name: _field_to_json(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
    }


def _field_to_json(field: Any, value: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(value)
    if field.is_repeated:
        return [_scalar_to_json(field, item) for item in value]
    return _scalar_to_json(field, value)


def _scalar_to_json(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return message_to_dict(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value
