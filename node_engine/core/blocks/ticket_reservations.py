"""Blocks that another node writes: those of a ticket, from its grant to commit or failure.

    FREE --reserve_for_ticket--> RESERVED --mark_writing--> WRITING --commit_ticket--> IN_USE
    RESERVED, WRITING --release_ticket--> FREE
    RESERVED, WRITING --quarantine_ticket--> QUARANTINED --free_quarantined_ticket--> FREE

A block of a ticket is not read, shared or evicted before the commit. If a hand-off fails while its
KV writer may still write, its blocks stay out of use until the writer is fenced off.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from baton.types import BlockIndex, TicketId
from node_engine.core.blocks.block_records import (
    BlockLedgerEntry,
    BlockLedgerError,
    BlockOwnership,
    BlockState,
    require_invariant,
)


@dataclass(slots=True)
class _TicketReservation:
    """The blocks of a ticket that has not committed."""

    owner: str
    blocks: tuple[BlockIndex, ...]
    state: BlockState
    since: float  # clock time, in seconds, of the last change of state


class TicketReservations:
    """The blocks of all tickets of a node that have not committed. Compute thread only."""

    def __init__(
        self,
        ownership: BlockOwnership,
        clock: Callable[[], float],
        take_free_blocks: Callable[[int], tuple[BlockIndex, ...] | None],
        return_free_blocks: Callable[[Iterable[BlockIndex]], None],
    ) -> None:
        """`take_free_blocks(count)` gives FREE blocks, ascending; None if there are too few."""
        self._ownership = ownership
        self._clock = clock
        self._take_free_blocks = take_free_blocks
        self._return_free_blocks = return_free_blocks
        self._reservations: dict[TicketId, _TicketReservation] = {}

    def reserve_for_ticket(
        self, count: int, ticket: TicketId, owner: str
    ) -> tuple[BlockIndex, ...] | None:
        """Set aside `count` blocks, ascending, for the KV writer of `ticket`.

        None if there are too few; nothing changes then.
        """
        if ticket in self._reservations or count < 1:
            raise BlockLedgerError(f"ticket {ticket}: {count} blocks requested, or known already")
        blocks = self._take_free_blocks(count)
        if blocks is None:
            return None
        self._ownership.change_states(blocks, BlockState.FREE, BlockState.RESERVED)
        self._reservations[ticket] = _TicketReservation(
            owner, blocks, BlockState.RESERVED, self._clock()
        )
        return blocks

    def mark_writing(self, ticket: TicketId) -> None:
        """The KV writer of `ticket` has begun to write."""
        self._change_ticket_state(ticket, (BlockState.RESERVED,), BlockState.WRITING)

    def commit_ticket(self, ticket: TicketId) -> tuple[BlockIndex, ...]:
        """All KV has landed and the writer is fenced off: the owner gets the blocks."""
        reservation = self._end_reservation(ticket, (BlockState.WRITING,), BlockState.IN_USE)
        self._ownership.add_references(reservation.blocks, reservation.owner)
        return reservation.blocks

    def release_ticket(self, ticket: TicketId) -> None:
        """The hand-off failed and its KV writer is fenced off: free the blocks."""
        allowed = (BlockState.RESERVED, BlockState.WRITING)
        reservation = self._end_reservation(ticket, allowed, BlockState.FREE)
        self._return_free_blocks(reservation.blocks)

    def quarantine_ticket(self, ticket: TicketId) -> None:
        """The hand-off failed, but its KV writer may still write: keep the blocks out of use."""
        allowed = (BlockState.RESERVED, BlockState.WRITING)
        self._change_ticket_state(ticket, allowed, BlockState.QUARANTINED)

    def free_quarantined_ticket(self, ticket: TicketId) -> None:
        """The KV writer of a quarantined ticket is fenced off: free the blocks."""
        reservation = self._end_reservation(ticket, (BlockState.QUARANTINED,), BlockState.FREE)
        self._return_free_blocks(reservation.blocks)

    def iter_ledger_entries(self) -> Iterator[BlockLedgerEntry]:
        now = self._clock()
        for ticket, reservation in self._reservations.items():
            yield BlockLedgerEntry(
                reservation.owner,
                reservation.state,
                len(reservation.blocks),
                now - reservation.since,
                ticket,
            )

    def check_invariants(self) -> None:
        """Raise BlockLedgerError unless exactly the blocks of tickets are in a ticket's state."""
        reservations = list(self._reservations.values())
        reserved = {
            block: reservation.state for reservation in reservations for block in reservation.blocks
        }
        require_invariant(
            len(reserved) == sum(len(reservation.blocks) for reservation in reservations),
            "a block is reserved twice",
        )
        for block, state in reserved.items():
            actual = self._ownership.get_block_state(block)
            require_invariant(actual is state, f"block {block} is {actual}: its ticket is {state}")
        in_ticket_states = sum(
            self._ownership.count_blocks(state)
            for state in (BlockState.RESERVED, BlockState.WRITING, BlockState.QUARANTINED)
        )
        require_invariant(in_ticket_states == len(reserved), "a reserved block has no ticket")

    def _change_ticket_state(
        self, ticket: TicketId, allowed: tuple[BlockState, ...], after: BlockState
    ) -> _TicketReservation:
        reservation = self._reservations.get(ticket)
        if reservation is None or reservation.state not in allowed:
            state = reservation.state.value if reservation else "unknown"
            raise BlockLedgerError(f"ticket {ticket} is {state}: it cannot become {after.value}")
        self._ownership.change_states(reservation.blocks, reservation.state, after)
        reservation.state, reservation.since = after, self._clock()
        return reservation

    def _end_reservation(
        self, ticket: TicketId, allowed: tuple[BlockState, ...], after: BlockState
    ) -> _TicketReservation:
        reservation = self._change_ticket_state(ticket, allowed, after)
        del self._reservations[ticket]
        return reservation
