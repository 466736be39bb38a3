"""The transfer plane as the two roles see it. Implemented in `plane_threads.py`.

Each side runs its own thread. Methods may be called from any thread and never block; calls of one
thread take effect in their order. What happened is reported as an event through the `emit` callback
that the plane was built with. The callback must be thread-safe and quick: it puts the event into
the compute thread's inbox. The plane never touches a block pool: it is told which blocks it may
write or read, and reports when it is done with them.

  prefill (outbound)                                decode (inbound)
    open_handoff(key, ...)                            grant_ticket(ticket)
    announce_layer(key, ...)*    == Write(layer) ==>    InboundStarted(ticket_id)
    set_ticket(key, ticket)                             (bytes land, are checked, not used yet)
    seal_handoff(key, info)      == Seal(manifest) ==>  InboundSealed(ticket_id, ...)
                                                      commit_ticket(ticket_id)
    OutboundCommitted(key, ...)  <== Committed ======
    or OutboundAborted(key, ...) <= Refused / Abort =>  or InboundLost, later perhaps InboundFenced
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
    OutboundAborted,
    OutboundCommitted,
    OutboundEvent,
    SealInfo,
)
from kv_transfer.core.handoff_common import CUDA_IPC
from kv_transfer.core.link_costs import LinkCost
from kv_transfer.core.send_queue import ReadyGate

__all__ = [
    "CUDA_IPC",
    "HandoffStats",
    "InboundEvent",
    "InboundFenced",
    "InboundLost",
    "InboundPlane",
    "InboundSealed",
    "InboundStarted",
    "LinkCost",
    "OutboundAborted",
    "OutboundCommitted",
    "OutboundEvent",
    "OutboundPlane",
    "ReadyGate",
    "SealInfo",
    "reads_device_memory",
]


class InboundPlane(Protocol):
    """Decode's side: lets writers with a ticket land slabs in the arena."""

    @property
    def endpoint(self) -> str:
        """The address that writers dial: PeerAddress.transfer_endpoint."""
        ...

    def rejoin(self, incarnation: Incarnation) -> None:
        """The node has a new incarnation: every open ticket is lost with StaleMessage."""
        ...

    def choose_transport(self, writer_host_id: str, writer_endpoint: str | None = None) -> str:
        """The transport for a writer on that host, with the endpoint that its plane states.

        As configured; by `auto` and, if the endpoint is known, by `cuda_ipc`, the fastest one that
        both ends can use."""
        ...

    def allocate_fence_byte(self) -> int:
        """A fence byte for a new ticket. It is never used again while this arena exists."""
        ...

    def grant_ticket(self, ticket: Ticket) -> None:
        """Accept writes under `ticket` from now on. Call it before the ticket leaves the node."""
        ...

    def commit_ticket(self, ticket: TicketId) -> None:
        """The blocks of a sealed ticket are in use: tell the writer."""
        ...

    def revoke_ticket(self, ticket: TicketId, error: BatonError) -> None:
        """Accept nothing more; ends in InboundLost. Unknown or ended tickets are only counted."""
        ...

    def on_peer_gone(self, writer: Incarnation) -> None:
        """The coordinator has lost this incarnation: its tickets are lost.

        Sealed ones are not: they wait for `commit_ticket` or `revoke_ticket`."""
        ...

    def counters(self) -> dict[str, float]:
        """Counters of this plane, by the last part of their metric's name."""
        ...

    def close(self) -> None:
        """Stop the thread. Every open ticket ends in InboundLost first."""
        ...


class OutboundPlane(Protocol):
    """Prefill's side: reads computed slabs from the arena and writes them to decode by layers."""

    @property
    def endpoint(self) -> str:
        """What tells decode that a device writes; else empty: a writer is never dialled."""
        ...

    def rejoin(self, incarnation: Incarnation) -> None:
        """The node has a new incarnation: every open hand-off aborts with StaleMessage."""
        ...

    def open_handoff(self, key: AttemptKey, num_tokens: int) -> None:
        """Begin a hand-off of `num_tokens` tokens of KV. Its ticket may come later.

        The caller holds a reference on every source block until the hand-off has ended."""
        ...

    def set_ticket(self, key: AttemptKey, ticket: Ticket) -> None:
        """The destination is known: send slabs that are ready. Unknown keys are only counted."""
        ...

    @property
    def link_cost(self) -> LinkCost:
        """What the link that was used last takes for a message."""
        ...

    def announce_layer(
        self,
        key: AttemptKey,
        layer: int,
        first: int,
        source: Sequence[BlockIndex],
        num_layers: int = 1,
        gate: ReadyGate | None = None,
    ) -> None:
        """Layers from `layer` on of the logical blocks from `first` on are final in `source`.

        Called from the forward pass, between layers: it only enqueues. Layers that are announced
        together travel together, as far as a message can carry them. With a `gate` they are final
        once its events have passed, and `mark_passed` must follow, unless the hand-off aborts. Only
        for a plane that reads device memory."""
        ...

    def seal_handoff(self, key: AttemptKey, info: SealInfo) -> None:
        """Every slab was announced.

        Sealing more or fewer blocks than those of `num_tokens` is a programming error: the hand-off
        aborts with IncompleteTransfer."""
        ...

    def abort_handoff(self, key: AttemptKey, error: BatonError) -> None:
        """Give up; ends in OutboundAborted. Unknown or ended keys are only counted."""
        ...

    def on_peer_gone(self, decode: Incarnation) -> None:
        """The coordinator has lost this incarnation: hand-offs to it abort."""
        ...

    def wait_for_layer(self, key: AttemptKey, layer: int, timeout: float) -> bool:
        """Block until every announced slab of `layer` has landed. Used by a failpoint.

        False when `timeout` seconds have passed or the hand-off has ended before that."""
        ...

    def counters(self) -> dict[str, float]:
        """Counters of this plane, by the last part of their metric's name."""
        ...

    def close(self) -> None:
        """Stop the thread. Every open hand-off ends in OutboundAborted first."""
        ...


def reads_device_memory(plane: OutboundPlane) -> bool:
    """Whether slabs are read where the engine computes, instead of in the host's arena."""
    return bool(plane.endpoint)
