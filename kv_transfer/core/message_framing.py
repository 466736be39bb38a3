"""Packs a frame and its payload into one message, for links whose messages have one part.

The message is the header's length in 4 bytes, little-endian, then the header, then the payload if
there is one.
"""

_LENGTH_PREFIX_BYTES = 4


def pack_message(header: bytes, payload: memoryview | None) -> bytes:
    """One message of header and payload. Copies the payload once."""
    length = len(header).to_bytes(_LENGTH_PREFIX_BYTES, "little")
    return b"".join((length, header) if payload is None else (length, header, payload))


def unpack_message(data: bytes) -> tuple[bytes, memoryview | None]:
    """Header and payload; the payload is not copied.

    Never raises: the header of bytes that `pack_message` did not make fails to parse as a frame."""
    end = _LENGTH_PREFIX_BYTES + int.from_bytes(data[:_LENGTH_PREFIX_BYTES], "little")
    return data[_LENGTH_PREFIX_BYTES:end], memoryview(data)[end:] if len(data) > end else None


def packed_message_size(header: int, payload: int) -> int:
    """Size of the message of a header and a payload of so many bytes."""
    return _LENGTH_PREFIX_BYTES + header + payload


def split_messages(received: bytearray, max_bytes: int) -> list[bytes]:
    """Take the whole messages without payload off the front of what a stream has received.

    Raises ValueError for one that is longer than `max_bytes`.
    """
    messages, start = [], 0
    while len(received) - start >= _LENGTH_PREFIX_BYTES:
        begin = start + _LENGTH_PREFIX_BYTES
        length = int.from_bytes(received[start:begin], "little")
        if length > max_bytes:
            raise ValueError(f"a message of {length} bytes; at most {max_bytes} are allowed")
        if len(received) - begin < length:
            break
        start = begin + length
        messages.append(bytes(received[begin:start]))
    del received[:start]
    return messages
