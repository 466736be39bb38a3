"""What a node says about its blocks: the states, and a snapshot that balances and names every
owner."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from baton.types import TicketId


class BlockState(Enum):
    """States of a block of the arena; `BlockPool` owns the transitions."""

    FREE = "free"
    RESERVED = "reserved"  # promised to the writer of a ticket
    WRITING = "writing"  # the writer has begun
    IN_USE = "in_use"  # referenced by at least one owner
    CACHED = "cached"  # referenced by nobody, full, found by its hash; evictable
    QUARANTINED = "quarantined"  # the ticket is lost, but its writer may still write


class BlockLedgerError(AssertionError):
    """An illegal transition or an account that does not balance: a programming error, never a
    caller's."""


def require_invariant(holds: bool, what: str) -> None:
    """An invariant of the books; unlike an assert it survives `python -O`."""
    if not holds:
        raise BlockLedgerError(f"the books do not agree: {what}")


@dataclass(frozen=True, slots=True)
class BlockLedgerEntry:
    """Blocks of one owner in one state. `owner` is the label given to the pool; `age_seconds` is in
    seconds, from the moment when the owner got its first block or, for a ticket's blocks, from
    their last change of state."""

    owner: str
    state: BlockState
    num_blocks: int
    age_seconds: float
    ticket_id: TicketId | None = None


@dataclass(frozen=True, slots=True)
class BlockLedger:
    """A snapshot. A shared block stands in the entry of each of its owners, so that IN_USE entries
    may add up to more than `counts[IN_USE]`; every other entry counts a block once."""

    num_blocks: int
    counts: Mapping[BlockState, int]
    entries: tuple[BlockLedgerEntry, ...]

    @property
    def is_balanced(self) -> bool:
        return sum(self.counts.values()) == self.num_blocks and min(self.counts.values()) >= 0
