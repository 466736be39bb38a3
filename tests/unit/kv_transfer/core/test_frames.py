"""Any bytes parse to a frame of the union or raise BadFrame, and every field is bounded."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.limits import MAX_LOGPROBS
from kv_transfer.core import frames
from kv_transfer.core.frames import (
    BadFrame,
    encode_frame,
    parse_frame_to_decode,
    parse_frame_to_writer,
)

IDS = ("0" * 32, 1, "writer", "decode")
A_PICKLE = b"\x80\x04\x95\n\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01a\x94K\x01s."  # of a dictionary
TO_DECODE: list[frames.FrameToDecode] = [
    frames.OpenFrame(*IDS, 1, 24, 1 << 15, 1 << 25, "host", "writer"),
    frames.WriteFrame(*IDS, 3, 2, 0, 7, 0, 2, 14 << 15, 2**64 - 1, True),
    frames.SealFrame(*IDS, 14, 14 << 15, 2**64 - 1, (5, 6), -0.5, ((6, -0.25), (9, -1.0))),
    frames.AbortFrame(*IDS, "cancelled", "the client left"),
    frames.RenewFrame(*IDS),
]
TO_WRITER: list[frames.FrameToWriter] = [
    frames.CreditFrame(*IDS, 1 << 25),
    frames.LandedFrame(*IDS, 3, 2, 0, 7),
    frames.CommittedFrame(*IDS),
    frames.RefusedFrame(*IDS, "stale", "no such ticket"),
]


@pytest.mark.parametrize("frame", TO_DECODE, ids=lambda frame: type(frame).__name__)
def test_frames_to_decode_survive_the_wire(frame: frames.FrameToDecode) -> None:
    assert parse_frame_to_decode(encode_frame(frame)) == frame
    with pytest.raises(BadFrame):
        parse_frame_to_writer(encode_frame(frame))


@pytest.mark.parametrize("frame", TO_WRITER, ids=lambda frame: type(frame).__name__)
def test_frames_to_the_writer_survive_the_wire(frame: frames.FrameToWriter) -> None:
    assert parse_frame_to_writer(encode_frame(frame)) == frame
    with pytest.raises(BadFrame):
        parse_frame_to_decode(encode_frame(frame))


def test_every_frame_of_the_union_is_tested() -> None:
    tested = {type(frame) for frame in [*TO_DECODE, *TO_WRITER]}
    assert tested == set(frames.Frame.__subclasses__())


@given(st.binary(max_size=300))
def test_random_bytes_are_a_bad_frame(data: bytes) -> None:
    for decode in (parse_frame_to_decode, parse_frame_to_writer):
        with pytest.raises(BadFrame):
            decode(data)


@given(st.sampled_from([*TO_DECODE, *TO_WRITER]), st.data())
def test_damaged_frames_never_raise_anything_else(frame: frames.Frame, data: st.DataObject) -> None:
    good = bytearray(encode_frame(frame))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)))
    for damaged in (bytes(good), bytes(good[:cut])):
        for decode in (parse_frame_to_decode, parse_frame_to_writer):
            try:
                assert isinstance(decode(damaged), frames.Frame)
            except BadFrame:
                pass


def test_pickles_and_deep_nests_are_bad_frames() -> None:
    deep = b"\x91" * 100_000 + b"\xc0"
    for data in (A_PICKLE, b"\x80\x04\x95", deep, b"\xdd\xff\xff\xff\xff", b""):
        with pytest.raises(BadFrame):
            parse_frame_to_decode(data)


def test_an_oversize_header_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(BadFrame, match="at most"):
        parse_frame_to_decode(bytes(frames.MAX_HEADER_BYTES + 1))


def _raw_fields(frame: frames.Frame) -> list[Any]:
    raw: list[Any] = msgspec.msgpack.decode(encode_frame(frame))
    return raw


@pytest.mark.parametrize("frame", [*TO_DECODE, *TO_WRITER], ids=lambda frame: type(frame).__name__)
def test_every_field_has_a_bound(frame: frames.Frame) -> None:
    """Each field in turn is too large, negative or of another type: BadFrame is raised."""
    tag, *values = _raw_fields(frame)
    decode = (
        parse_frame_to_decode
        if isinstance(frame, tuple(type(known) for known in TO_DECODE))
        else parse_frame_to_writer
    )
    names = frame.__struct_fields__
    for place, name in enumerate(names):
        for bad in _out_of_bounds_values(name, values[place]):
            changed = [*values[:place], bad, *values[place + 1 :]]
            with pytest.raises(BadFrame):
                decode(msgspec.msgpack.encode([tag, *changed]))
    with pytest.raises(BadFrame):
        decode(msgspec.msgpack.encode([tag, *values, 0]))
    required = sum(field.required for field in msgspec.structs.fields(frame))
    with pytest.raises(BadFrame):
        decode(msgspec.msgpack.encode([tag, *values[: required - 1]]))


def _out_of_bounds_values(name: str, value: Any) -> list[Any]:
    match value:
        case bool():
            return [None, "x", 2]
        case float():
            return [0.5, "x", b"x"]
        case int() if name in ("checksum", "digest"):
            return [-1, "x", 1.5, None]
        case int():
            return [-1, 2**63, "x", 1.5, None]
        case str():
            return ["x" * 600, 5, None, b"x"]
        case list() if name == "top":
            too_many = [[1, -1.0]] * (MAX_LOGPROBS + 1)
            return [
                too_many,
                [[-1, -1.0]],
                [[2**40, -1.0]],
                [[1, 0.5]],
                [[1]],
                [[1, -1.0, -1.0]],
                [1],
                5,
                None,
            ]
        case list():
            return [[-1], [2**40], ["x"], 5, None]
    raise AssertionError(f"{name} has no bad values yet")
