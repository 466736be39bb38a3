"""The messages between the coordinator and the process that compiles grammars."""

import struct
from collections.abc import Iterator

import msgspec

MAX_FRAME_BYTES = 4 << 20
_FRAME_HEADER = struct.Struct("<I")  # the size of the body


class CompileJob(msgspec.Struct, frozen=True):
    """A grammar to compile."""

    id: int
    kind: str
    text: str
    timeout_seconds: float
    memory_bytes: int


class Verdict(msgspec.Struct, frozen=True):
    """What came of a job."""

    id: int
    error: str = ""  # why the grammar is refused
    text: str = ""  # the text that nodes compile instead, if it was converted
    seconds: float = 0.0  # that the job took
    is_late: bool = False  # the job was stopped when its time was over
    is_starved: bool = False  # and had little of the CPU until then, so that it may be tried again


def encode_frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _FRAME_HEADER.pack(len(body)) + body


def split_frames(buffer: bytearray) -> Iterator[bytes]:
    """Remove the complete frames from the buffer. Raises ValueError for one that is too long."""
    while len(buffer) >= _FRAME_HEADER.size:
        (size,) = _FRAME_HEADER.unpack_from(buffer)
        if size > MAX_FRAME_BYTES:
            raise ValueError(f"a frame has {size} bytes")
        end = _FRAME_HEADER.size + size
        if len(buffer) < end:
            return
        body = bytes(buffer[_FRAME_HEADER.size : end])
        del buffer[:end]
        yield body
