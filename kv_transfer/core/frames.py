"""The frames of the transfer plane: a closed union, bounded in every field, encoded as MessagePack
arrays.

Writer to decode: Open, Write, Seal, Abort, Renew. Decode to writer: Credit, Landed, Committed,
Refused. Every frame names the ticket, the attempt and the incarnations of both ends, so that a
frame of another life is told from one of this life by its contents, never by the connection that it
came on. A Write with `inline` is followed by its payload as a second message part; without it the
payload lies in decode's arena already.
"""

from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from baton.limits import MAX_LOGPROBS
from baton.types import TokenLogprobs
from kv_transfer.core.slabs import SlabRange

PROTOCOL_VERSION: Final = 1
INITIAL_WINDOW_BYTES: Final = (
    1 << 20
)  # bytes a writer may have outstanding before decode's first Credit
MAX_HEADER_BYTES: Final = 16 << 20  # bounds Seal's token list; every other frame is under 1 KiB

Id = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
IncarnationId = Annotated[str, Meta(min_length=1, max_length=64)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Size = Annotated[int, Meta(ge=0, le=2**48)]
Digest = Annotated[int, Meta(ge=0)]  # MessagePack has no integers beyond 64 bits
Token = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Logprob = Annotated[float, Meta(le=0)]  # NaN and infinity are left to the role
Text = Annotated[str, Meta(max_length=512)]
Code = Annotated[str, Meta(max_length=64)]


class Frame(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What all frames carry. `writer_incarnation` and `decode_incarnation` are incarnations."""

    ticket_id: Id
    attempt: Count
    writer_incarnation: IncarnationId
    decode_incarnation: IncarnationId


class OpenFrame(Frame, frozen=True, tag="open"):
    """The writer has the ticket. `window_bytes` asks for that many bytes of credit; geometry is
    checked against the arena."""

    version: Count
    num_layers: Count
    slab_bytes: Size
    window_bytes: Size
    host_id: Text


class WriteFrame(Frame, frozen=True, tag="write"):
    """Slabs of layers [layer, layer + layers) of logical blocks [block, block + blocks), all heads
    [head, head + heads). The payload is layer-major. `checksum` is xxh3_64 over it."""

    first_layer: Count
    num_layers: Count
    first_block: Count
    num_blocks: Count
    first_kv_head: Count
    num_kv_heads: Count
    payload_bytes: Size
    checksum: Digest
    is_inline: bool

    @property
    def slab_range(self) -> SlabRange:
        return SlabRange(self.first_layer, self.num_layers, self.first_block, self.num_blocks)


class SealFrame(Frame, frozen=True, tag="seal"):
    """Everything was written. The manifest: how many slabs and bytes, and an order-free digest over
    every Write. `logprob` and `top` are the score of the last token of `emitted_token_ids`, if the
    request asks for scores."""

    num_slabs: Count
    payload_bytes: Size
    digest: Digest
    emitted_token_ids: Annotated[tuple[Token, ...], Meta(max_length=1 << 21)]
    logprob: Logprob | None
    top: Annotated[tuple[tuple[Token, Logprob], ...], Meta(max_length=MAX_LOGPROBS)]

    @property
    def last_token_score(self) -> TokenLogprobs | None:
        return None if self.logprob is None else TokenLogprobs(self.logprob, self.top)


class AbortFrame(Frame, frozen=True, tag="abort"):
    code: Code
    message: Text


class RenewFrame(Frame, frozen=True, tag="renew"):
    """The writer lives and still means to use the ticket."""


class CreditFrame(Frame, frozen=True, tag="credit"):
    """Up to `window_bytes` bytes may be sent and not yet landed."""

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
    pass


class RefusedFrame(Frame, frozen=True, tag="refused"):
    """The hand-off is over and did not commit; also the answer to Abort. `code` is an error's code
    on Baton's wire."""

    code: Code
    message: Text


FrameToDecode = OpenFrame | WriteFrame | SealFrame | AbortFrame | RenewFrame
FrameToWriter = CreditFrame | LandedFrame | CommittedFrame | RefusedFrame

F = TypeVar("F")

encode_frame = msgspec.msgpack.Encoder().encode
_TO_DECODE_DECODER: msgspec.msgpack.Decoder[FrameToDecode] = msgspec.msgpack.Decoder(FrameToDecode)
_TO_WRITER_DECODER: msgspec.msgpack.Decoder[FrameToWriter] = msgspec.msgpack.Decoder(FrameToWriter)


class BadFrame(Exception):
    """Bytes that are no frame of this protocol."""


def parse_frame_to_decode(data: bytes | memoryview) -> FrameToDecode:
    """Raises BadFrame."""
    return _parse(_TO_DECODE_DECODER, data)


def parse_frame_to_writer(data: bytes | memoryview) -> FrameToWriter:
    """Raises BadFrame."""
    return _parse(_TO_WRITER_DECODER, data)


def _parse(decoder: "msgspec.msgpack.Decoder[F]", data: bytes | memoryview) -> F:
    if len(data) > MAX_HEADER_BYTES:
        raise BadFrame(f"a header of {len(data)} bytes; at most {MAX_HEADER_BYTES} are allowed")
    try:
        return decoder.decode(data)
    except (
        msgspec.MsgspecError,
        ValueError,
        RecursionError,
    ) as error:  # ValueError: a string that is no UTF-8
        raise BadFrame(str(error)) from error
