"""What the transfer plane tells the roles, as plain data. plane.py says when."""

from dataclasses import dataclass

from baton.errors import BatonError
from baton.types import AttemptKey, TicketId, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SealInfo:
    """What Seal carries beside the manifest: the tokens of this request's output so far, and the
    score of the last of them if the request asks for scores. All else derives from the Request, so
    that a decode-to-decode move can use the same message."""

    emitted_token_ids: tuple[int, ...]
    last_token_score: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class HandoffStats:
    """Figures of one committed hand-off, on the sender's steady clock, in seconds and bytes."""

    transport: str
    bytes_sent: int
    slabs_sent: int
    slabs_landed_before_last_layer: int  # landed before the forward pass of the last chunk ended
    exposed_seconds: float  # from the last layer computed to the last slab landed
    commit_seconds: float  # from the last slab landed to Committed


# events, decode side


@dataclass(frozen=True, slots=True)
class InboundStarted:
    """The first Write of a ticket has been seen."""

    ticket_id: TicketId


@dataclass(frozen=True, slots=True)
class InboundSealed:
    """Every (layer, block) of the ticket has landed, once, with the right checksum, and no writer
    can write any more. The compute thread answers with `commit` or `revoke`."""

    ticket_id: TicketId
    seal_info: SealInfo
    bytes_landed: int


@dataclass(frozen=True, slots=True)
class InboundLost:
    """The hand-off will not commit. `is_fenced` says whether its blocks may be reused now; if not
    they are to be QUARANTINED until `InboundFenced` follows. Emitted exactly once per granted
    ticket that does not commit, whether it expired, failed, or was revoked by the compute
    thread."""

    ticket_id: TicketId
    error: BatonError
    is_fenced: bool


@dataclass(frozen=True, slots=True)
class InboundFenced:
    """Proof is in hand that the writer of a lost ticket can write no more: its blocks may be
    reused."""

    ticket_id: TicketId


InboundEvent = InboundStarted | InboundSealed | InboundLost | InboundFenced


# events, prefill side


@dataclass(frozen=True, slots=True)
class LayerLanded:
    """Decode has acknowledged layer `layer` of blocks [first, last) of the hand-off."""

    key: AttemptKey
    layer: int
    first_block: int
    end_block: int


@dataclass(frozen=True, slots=True)
class OutboundCommitted:
    """Decode has committed. The source blocks are no longer needed."""

    key: AttemptKey
    stats: HandoffStats


@dataclass(frozen=True, slots=True)
class OutboundAborted:
    """The hand-off is over and did not commit. The plane reads the source blocks no more. Exactly
    one of Committed and Aborted ends every open()."""

    key: AttemptKey
    error: BatonError


OutboundEvent = LayerLanded | OutboundCommitted | OutboundAborted
