"""A frame and its payload as one message, for links that carry single messages: the header's length
in 4 bytes, little-endian, then the header, then the payload if there is one."""

_LENGTH_PREFIX_BYTES = 4  # bytes


def pack_message(header: bytes, payload: memoryview | None) -> bytes:
    """One copy of the payload."""
    length = len(header).to_bytes(_LENGTH_PREFIX_BYTES, "little")
    return b"".join((length, header) if payload is None else (length, header, payload))


def unpack_message(data: bytes) -> tuple[bytes, memoryview | None]:
    """Header and payload, the payload not copied. Never fails: what nobody packed has no frame as
    header."""
    end = _LENGTH_PREFIX_BYTES + int.from_bytes(data[:_LENGTH_PREFIX_BYTES], "little")
    return data[_LENGTH_PREFIX_BYTES:end], memoryview(data)[end:] if len(data) > end else None


def packed_message_size(header: int, payload: int) -> int:
    """Bytes of the message of a header and a payload of so many bytes."""
    return _LENGTH_PREFIX_BYTES + header + payload
