"""What the transfer plane tells the roles, as plain data. plane.py says when."""

from dataclasses import dataclass

from baton.errors import BatonError
from baton.types import AttemptKey, TicketId, TokenScore


@dataclass(frozen=True, slots=True)
class SealInfo:
    """What Seal carries beside the manifest: the tokens of this request's output so far, and the score of the last of
    them if the request asks for scores. All else derives from the Request, so that a decode-to-decode move can use the
    same message."""

    emitted: tuple[int, ...]
    score: TokenScore | None = None


@dataclass(frozen=True, slots=True)
class OutboundReport:
    """Figures of one committed hand-off, on the sender's steady clock, in seconds and bytes."""

    transport: str
    bytes_sent: int
    slabs_sent: int
    slabs_landed_before_last_layer: int  # landed before the forward pass of the last chunk ended
    exposed_seconds: float  # from the last layer computed to the last slab landed
    commit_seconds: float  # from the last slab landed to Committed


# events, decode side


@dataclass(frozen=True, slots=True)
class Started:
    """The first Write of a ticket has been seen."""

    ticket: TicketId


@dataclass(frozen=True, slots=True)
class Sealed:
    """Every (layer, block) of the ticket has landed, once, with the right checksum, and no writer can write any more.
    The compute thread answers with `commit` or `revoke`."""

    ticket: TicketId
    seal: SealInfo
    bytes_landed: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The hand-off will not commit. `fenced` says whether its blocks may be reused now; if not they are to be
    QUARANTINED until `Fenced` follows. Emitted exactly once per granted ticket that does not commit, whether it
    expired, failed, or was revoked by the compute thread."""

    ticket: TicketId
    error: BatonError
    fenced: bool


@dataclass(frozen=True, slots=True)
class Fenced:
    """Proof is in hand that the writer of a lost ticket can write no more: its blocks may be reused."""

    ticket: TicketId


InboundEvent = Started | Sealed | Lost | Fenced


# events, prefill side


@dataclass(frozen=True, slots=True)
class LayerLanded:
    """Decode has acknowledged layer `layer` of blocks [first, last) of the hand-off."""

    key: AttemptKey
    layer: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Decode has committed. The source blocks are no longer needed."""

    key: AttemptKey
    report: OutboundReport


@dataclass(frozen=True, slots=True)
class Aborted:
    """The hand-off is over and did not commit. The plane reads the source blocks no more. Exactly one of Committed and
    Aborted ends every open()."""

    key: AttemptKey
    error: BatonError


OutboundEvent = LayerLanded | Committed | Aborted
