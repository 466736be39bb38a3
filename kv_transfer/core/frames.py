"""The frames of the transfer plane: a closed union of MessagePack arrays, every field bounded.

Writer to decode: Open, Write, Seal, Abort, Renew. Decode to writer: Credit, Landed, Committed,
Refused. Every frame names the ticket, the attempt and the incarnations of both ends, so that its
contents tell a frame of an earlier incarnation from one of the present one, whatever connection it
came on. The payload of an inline Write follows as a second message part; otherwise it lies in
decode's arena already.
"""

from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from baton.limits import MAX_LOGPROBS
from baton.types import TokenLogprobs
from kv_transfer.core.slabs import SlabRange

PROTOCOL_VERSION: Final = 2
OLDEST_WRITER_VERSION: Final = 1  # whose Open has no `writer_process`
# Bytes that a writer may send before decode's first Credit.
INITIAL_WINDOW_BYTES: Final = 1 << 20
MAX_HEADER_BYTES: Final = 16 << 20  # bounds Seal's token list; every other frame is under 1 KiB

Id = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
IncarnationId = Annotated[str, Meta(min_length=1, max_length=64)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Size = Annotated[int, Meta(ge=0, le=2**48)]
Digest = Annotated[int, Meta(ge=0)]  # MessagePack has no integers beyond 64 bits
Token = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Logprob = Annotated[float, Meta(le=0)]  # the role refuses NaN and infinity
Text = Annotated[str, Meta(max_length=512)]
Code = Annotated[str, Meta(max_length=64)]


class Frame(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The fields that every frame carries."""

    ticket_id: Id
    attempt: Count
    writer_incarnation: IncarnationId
    decode_incarnation: IncarnationId

    @property
    def ids(self) -> tuple[str, int, str, str]:
        """Ticket, attempt, and incarnations of writer and decode."""
        return self.ticket_id, self.attempt, self.writer_incarnation, self.decode_incarnation


class OpenFrame(Frame, frozen=True, tag="open"):
    """The writer has the ticket, and asks for credit."""

    version: Count  # PROTOCOL_VERSION of the writer
    num_layers: Count  # checked against decode's arena, as is the next
    slab_bytes: Size
    window_bytes: Size  # credit asked for
    host_id: Text  # the writer's host
    # The file by which the end of the writer's process is proven; empty if no device writes.
    writer_process: Text = ""


class WriteFrame(Frame, frozen=True, tag="write"):
    """Slabs of some layers of some logical blocks. The payload is layer-major."""

    first_layer: Count
    num_layers: Count
    first_block: Count
    num_blocks: Count
    first_kv_head: Count
    num_kv_heads: Count  # always all heads in this version
    payload_bytes: Size
    checksum: Digest  # xxh3_64 of the payload
    is_inline: bool  # the payload follows as a second message part

    @property
    def slab_range(self) -> SlabRange:
        return SlabRange(self.first_layer, self.num_layers, self.first_block, self.num_blocks)


class SealFrame(Frame, frozen=True, tag="seal"):
    """Everything was written. The frame carries the manifest and the request's output so far."""

    num_slabs: Count
    payload_bytes: Size
    digest: Digest  # over every Write, in any order: extend_manifest_digest
    emitted_token_ids: Annotated[tuple[Token, ...], Meta(max_length=1 << 21)]
    # Score of the last of these tokens, if the request asks for scores.
    logprob: Logprob | None
    top: Annotated[tuple[tuple[Token, Logprob], ...], Meta(max_length=MAX_LOGPROBS)]

    @property
    def last_token_score(self) -> TokenLogprobs | None:
        return None if self.logprob is None else TokenLogprobs(self.logprob, self.top)


class AbortFrame(Frame, frozen=True, tag="abort"):
    """The writer gives the hand-off up."""

    code: Code
    message: Text


class RenewFrame(Frame, frozen=True, tag="renew"):
    """The writer is alive and still means to use the ticket."""


class CreditFrame(Frame, frozen=True, tag="credit"):
    """The writer may have up to `window_bytes` bytes sent and not yet landed."""

    window_bytes: Size


class LandedFrame(Frame, frozen=True, tag="landed"):
    """A Write has landed and its checksum was right."""

    first_layer: Count
    num_layers: Count
    first_block: Count
    num_blocks: Count

    @property
    def slab_range(self) -> SlabRange:
        return SlabRange(self.first_layer, self.num_layers, self.first_block, self.num_blocks)


class CommittedFrame(Frame, frozen=True, tag="committed"):
    """Decode uses the blocks."""


class RefusedFrame(Frame, frozen=True, tag="refused"):
    """The hand-off is over and did not commit. This is also the answer to Abort."""

    code: Code  # of an error in baton/errors.py
    message: Text


FrameToDecode = OpenFrame | WriteFrame | SealFrame | AbortFrame | RenewFrame
FrameToWriter = CreditFrame | LandedFrame | CommittedFrame | RefusedFrame

F = TypeVar("F")

encode_frame = msgspec.msgpack.Encoder().encode
_TO_DECODE_DECODER: msgspec.msgpack.Decoder[FrameToDecode] = msgspec.msgpack.Decoder(FrameToDecode)
_TO_WRITER_DECODER: msgspec.msgpack.Decoder[FrameToWriter] = msgspec.msgpack.Decoder(FrameToWriter)


class BadFrame(Exception):
    """The bytes are not a frame of this protocol."""


def parse_frame_to_decode(data: bytes | memoryview) -> FrameToDecode:
    """Parse a frame from a writer. Raises BadFrame."""
    return _parse(_TO_DECODE_DECODER, data)


def parse_frame_to_writer(data: bytes | memoryview) -> FrameToWriter:
    """Parse a frame from decode. Raises BadFrame."""
    return _parse(_TO_WRITER_DECODER, data)


def corrupt_header(header: bytes) -> bytes:
    """For tests: the header with its first bit flipped."""
    return bytes((header[0] ^ 1, *header[1:]))


def _parse(decoder: "msgspec.msgpack.Decoder[F]", data: bytes | memoryview) -> F:
    if len(data) > MAX_HEADER_BYTES:
        raise BadFrame(f"a header of {len(data)} bytes; at most {MAX_HEADER_BYTES} are allowed")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        # ValueError: a string is not valid UTF-8.
        raise BadFrame(str(error)) from error
