"""Events that the transfer plane reports to the roles, as plain data."""

from dataclasses import dataclass

from baton.errors import BatonError
from baton.types import AttemptKey, TicketId, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SealInfo:
    """What the last frame of a hand-off carries beside the manifest: the request's output."""

    emitted_token_ids: tuple[int, ...]  # the request's output so far
    last_token_score: TokenLogprobs | None = None  # of the last of these, if logprobs are requested


@dataclass(frozen=True, slots=True)
class HandoffStats:
    """Measurements of one committed hand-off, on the sender's steady clock."""

    transport: str
    bytes_sent: int
    slabs_sent: int
    slabs_landed_before_last_layer: int  # before the forward pass of the last chunk ended
    exposed_seconds: float  # from the last layer computed to the last slab landed
    commit_seconds: float  # from the last slab landed to Committed


# events, decode side


@dataclass(frozen=True, slots=True)
class InboundStarted:
    """The first slab of a ticket has landed."""

    ticket_id: TicketId


@dataclass(frozen=True, slots=True)
class InboundSealed:
    """Every slab has landed once, with the right checksum, and no writer can write any more.

    The node answers with `commit_ticket` or `revoke_ticket`."""

    ticket_id: TicketId
    seal_info: SealInfo
    bytes_landed: int


@dataclass(frozen=True, slots=True)
class InboundLost:
    """The hand-off will not commit: it expired, failed or was revoked.

    Emitted exactly once for each granted ticket that does not commit."""

    ticket_id: TicketId
    error: BatonError
    is_fenced: bool  # the blocks may be reused now; if not, only after InboundFenced


@dataclass(frozen=True, slots=True)
class InboundFenced:
    """The writer of a lost ticket provably cannot write any more: its blocks may be reused."""

    ticket_id: TicketId


InboundEvent = InboundStarted | InboundSealed | InboundLost | InboundFenced


# events, prefill side


@dataclass(frozen=True, slots=True)
class OutboundCommitted:
    """Decode has committed. The plane no longer reads the source blocks."""

    key: AttemptKey
    stats: HandoffStats


@dataclass(frozen=True, slots=True)
class OutboundAborted:
    """The hand-off is over and did not commit. The plane no longer reads the source blocks.

    Exactly one of OutboundCommitted and OutboundAborted ends every opened hand-off."""

    key: AttemptKey
    error: BatonError


OutboundEvent = OutboundCommitted | OutboundAborted
