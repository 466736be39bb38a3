"""Bounds the number of fields of a protobuf message, counted in its bytes before it is parsed.

Parsing makes an object for each field while it holds Python's lock. Counting stops at the bound.
"""

from google.protobuf.descriptor import Descriptor

from baton.errors import InvalidRequest
from baton.limits import MAX_GRPC_FIELDS

_ALWAYS_WITHIN_BYTES = 2 * MAX_GRPC_FIELDS  # a field takes at least two bytes
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def check_field_count(data: bytes, message_type: Descriptor) -> None:
    """Raises InvalidRequest if a message has more than MAX_GRPC_FIELDS fields.

    Fields of nested messages that can have nested messages themselves are counted, too. Malformed
    bytes are left to the parser.
    """
    if len(data) <= _ALWAYS_WITHIN_BYTES:
        return
    left = MAX_GRPC_FIELDS
    open_ = [(0, len(data), message_type)]
    while open_:
        offset, end, message_type = open_.pop()
        fields = message_type.fields_by_number
        while offset < end:
            left -= 1
            if left < 0:
                raise InvalidRequest(
                    f"the message has more than {MAX_GRPC_FIELDS} fields and messages in it"
                )
            tag, offset = _read_varint(data, offset, end)
            if tag & 7 == _BYTES:
                size, offset = _read_varint(data, offset, end)
                field = fields.get(tag >> 3)
                if (
                    field is not None
                    and field.message_type is not None
                    and _has_submessages(field.message_type)
                ):
                    open_.append((offset, min(offset + size, end), field.message_type))
                offset += size
            elif tag & 7 == _VARINT:
                _, offset = _read_varint(data, offset, end)
            elif tag & 7 in (_FIXED64, _FIXED32):
                offset += 8 if tag & 7 == _FIXED64 else 4
            else:
                return


def _has_submessages(message_type: Descriptor) -> bool:
    return not message_type.GetOptions().map_entry and any(
        field.message_type is not None for field in message_type.fields
    )


def _read_varint(data: bytes, offset: int, end: int) -> tuple[int, int]:
    """Return the varint at `offset` and the position after it."""
    value = shift = 0
    while offset < end:
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 or shift > 63:
            break
        shift += 7
    return value, offset
