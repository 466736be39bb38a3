"""The transfer plane as the two roles see it. Implemented by `inbound_plane.py` and
`outbound_plane.py`.

Each side runs its own thread. Methods may be called from any thread and never block; calls of one
thread take effect in their order. What happened comes back as an event through the `emit` callback
that the plane was built with, which has to be thread-safe and quick (it puts the event on the
compute thread's inbox). The plane never touches a block pool: it is told which blocks it may write
or read, and says when it is done with them.

    prefill (outbound)                                    decode (inbound)
      open(key, ...)                                        grant(ticket)
      layer_ready(key, layer, ...)*  == Write(layer) ==>      Started(ticket)
      ticket(key, ticket)                                     (landing, checked, invisible)
      seal(key, seal)                == Seal(manifest) =>     Sealed(ticket, seal): everything landed and checked
                                                            commit(ticket)
      Committed(key, report)         <== Committed ========
      or Aborted(key, error)         <== Refused/Abort ====   Lost(ticket, error), later Fenced(ticket)
"""

from collections.abc import Sequence
from typing import Protocol

from baton.errors import BatonError
from baton.types import AttemptKey, BlockIndex, Incarnation, Ticket, TicketId
from kv_transfer.core.events import (
    HandoffStats,
    InboundEvent,
    InboundFenced,
    InboundLost,
    InboundSealed,
    InboundStarted,
    LayerLanded,
    OutboundAborted,
    OutboundCommitted,
    OutboundEvent,
    SealInfo,
)

__all__ = [
    "HandoffStats",
    "InboundEvent",
    "InboundFenced",
    "InboundLost",
    "InboundPlane",
    "InboundSealed",
    "InboundStarted",
    "LayerLanded",
    "OutboundAborted",
    "OutboundCommitted",
    "OutboundEvent",
    "OutboundPlane",
    "SealInfo",
]


class InboundPlane(Protocol):
    """Decode's side: lets granted writers land slabs in the arena."""

    @property
    def endpoint(self) -> str:
        """Where writers connect: goes into PeerAddress.transfer_endpoint."""
        ...

    def rejoin(self, incarnation: Incarnation) -> None:
        """A new incarnation of this node: every open ticket is lost (Stale), later frames for them
        are refused."""
        ...

    def choose_transport(self, writer_host_id: str) -> str:
        """The backend for a writer on that host, by configuration and proof of the same host."""
        ...

    def allocate_fence_byte(self) -> int:
        """A fence byte for a new ticket; never reused in the life of this arena."""
        ...

    def grant_ticket(self, ticket: Ticket) -> None:
        """Accept writes under `ticket` from now on. Called before the ticket leaves the node."""
        ...

    def commit_ticket(self, ticket: TicketId) -> None:
        """After Sealed: the blocks are in use; tell the writer."""
        ...

    def revoke_ticket(self, ticket: TicketId, error: BatonError) -> None:
        """Stop accepting; ends in Lost. Unknown or ended tickets are a counted no-op."""
        ...

    def on_peer_gone(self, writer: Incarnation) -> None:
        """The coordinator says that this incarnation is no more: its tickets are lost, but for
        those that are Sealed, which wait for `commit_ticket` or `revoke_ticket`."""
        ...

    def counters(self) -> dict[str, float]: ...

    def close(self) -> None:
        """Stop the thread; every open ticket ends in Lost first."""
        ...


class OutboundPlane(Protocol):
    """Prefill's side: reads computed slabs from the arena and writes them to the peer, layer by
    layer."""

    @property
    def endpoint(self) -> str: ...

    def rejoin(self, incarnation: Incarnation) -> None:
        """A new incarnation of this node: every open hand-off is Aborted (Stale)."""
        ...

    def open_handoff(self, key: AttemptKey, num_tokens: int) -> None:
        """Begin a hand-off of `num_tokens` tokens of KV, perhaps before its ticket is known. The
        caller holds a reference on every source block until Committed or Aborted."""
        ...

    def set_ticket(self, key: AttemptKey, ticket: Ticket) -> None:
        """The destination is known; slabs that are ready begin to flow. Unknown keys are a counted
        no-op."""
        ...

    def announce_layer(
        self, key: AttemptKey, layer: int, first: int, source: Sequence[BlockIndex]
    ) -> None:
        """Layer `layer` of logical blocks first .. first + len(source) is final in the arena's
        blocks `source`. Called from the forward pass, between layers: it only enqueues."""
        ...

    def seal_handoff(self, key: AttemptKey, info: SealInfo) -> None:
        """Everything was announced by layer_ready. Sealing more or less than num_tokens of blocks
        is a programming error and aborts the hand-off with Incomplete."""
        ...

    def abort_handoff(self, key: AttemptKey, error: BatonError) -> None:
        """Give up; ends in Aborted. Unknown or ended keys are a counted no-op."""
        ...

    def on_peer_gone(self, decode: Incarnation) -> None:
        """The coordinator says that this incarnation is no more: hand-offs to it are aborted."""
        ...

    def wait_for_layer(self, key: AttemptKey, layer: int, timeout: float) -> bool:
        """Block until every announced slab of `layer` has landed (a failpoint uses it to prove
        layer streaming). False when `timeout` seconds passed or the hand-off ended first."""
        ...

    def counters(self) -> dict[str, float]: ...

    def close(self) -> None: ...
