"""The frames of the transfer plane: a closed union, bounded in every field, encoded as MessagePack arrays.

Writer to decode: Open, Write, Seal, Abort, Renew. Decode to writer: Credit, Landed, Committed, Refused. Every
frame names the ticket, the attempt and the incarnations of both ends, so that a frame of another life is told
from one of this life by its contents, never by the connection that it came on. A Write with `inline` is
followed by its payload as a second message part; without it the payload lies in decode's arena already.
"""

from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from baton.limits import MAX_LOGPROBS
from baton.types import TokenScore
from kv_transfer.core.slabs import Rectangle

PROTOCOL_VERSION: Final = 1
INITIAL_WINDOW: Final = 1 << 20  # bytes a writer may have outstanding before decode's first Credit
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
    """What all frames carry. `writer` and `decode` are incarnations."""

    ticket: Id
    attempt: Count
    writer: IncarnationId
    decode: IncarnationId


class Open(Frame, frozen=True, tag="open"):
    """The writer has the ticket. `window` asks for that many bytes of credit; geometry is checked against the
    arena."""

    version: Count
    num_layers: Count
    slab_bytes: Size
    window: Size
    host: Text


class Write(Frame, frozen=True, tag="write"):
    """Slabs of layers [layer, layer + layers) of logical blocks [block, block + blocks), all heads [head,
    head + heads). The payload is layer-major. `checksum` is xxh3_64 over it."""

    layer: Count
    layers: Count
    block: Count
    blocks: Count
    head: Count
    heads: Count
    size: Size
    checksum: Digest
    inline: bool

    @property
    def area(self) -> Rectangle:
        return Rectangle(self.layer, self.layers, self.block, self.blocks)


class Seal(Frame, frozen=True, tag="seal"):
    """Everything was written. The manifest: how many slabs and bytes, and an order-free digest over every
    Write. `logprob` and `top` are the score of the last token of `emitted`, if the request asks for scores."""

    slabs: Count
    size: Size
    digest: Digest
    emitted: Annotated[tuple[Token, ...], Meta(max_length=1 << 21)]
    logprob: Logprob | None
    top: Annotated[tuple[tuple[Token, Logprob], ...], Meta(max_length=MAX_LOGPROBS)]

    @property
    def score(self) -> TokenScore | None:
        return None if self.logprob is None else TokenScore(self.logprob, self.top)


class Abort(Frame, frozen=True, tag="abort"):
    code: Code
    message: Text


class Renew(Frame, frozen=True, tag="renew"):
    """The writer lives and still means to use the ticket."""


class Credit(Frame, frozen=True, tag="credit"):
    """Up to `window` bytes may be sent and not yet landed."""

    window: Size


class Landed(Frame, frozen=True, tag="landed"):
    """A Write has landed and its checksum was right."""

    layer: Count
    layers: Count
    block: Count
    blocks: Count

    @property
    def area(self) -> Rectangle:
        return Rectangle(self.layer, self.layers, self.block, self.blocks)


class Committed(Frame, frozen=True, tag="committed"):
    pass


class Refused(Frame, frozen=True, tag="refused"):
    """The hand-off is over and did not commit; also the answer to Abort. `code` is an error's code on Baton's
    wire."""

    code: Code
    message: Text


ToDecode = Open | Write | Seal | Abort | Renew
ToWriter = Credit | Landed | Committed | Refused

F = TypeVar("F")

encode = msgspec.msgpack.Encoder().encode
_to_decode: msgspec.msgpack.Decoder[ToDecode] = msgspec.msgpack.Decoder(ToDecode)
_to_writer: msgspec.msgpack.Decoder[ToWriter] = msgspec.msgpack.Decoder(ToWriter)


class BadFrame(Exception):
    """Bytes that are no frame of this protocol."""


def decode_to_decode(data: bytes | memoryview) -> ToDecode:
    """Raises BadFrame."""
    return _decode(_to_decode, data)


def decode_to_writer(data: bytes | memoryview) -> ToWriter:
    """Raises BadFrame."""
    return _decode(_to_writer, data)


def _decode(decoder: "msgspec.msgpack.Decoder[F]", data: bytes | memoryview) -> F:
    if len(data) > MAX_HEADER_BYTES:
        raise BadFrame(f"a header of {len(data)} bytes; at most {MAX_HEADER_BYTES} are allowed")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: a string that is no UTF-8
        raise BadFrame(str(error)) from error
