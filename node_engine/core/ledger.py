"""What a node says about its blocks: the states, and a snapshot that balances and names every owner."""

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


class LedgerError(AssertionError):
    """An illegal transition or an account that does not balance: a programming error, never a caller's."""


def require(holds: bool, what: str) -> None:
    """An invariant of the books; unlike an assert it survives `python -O`."""
    if not holds:
        raise LedgerError(f"the books do not agree: {what}")


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """Blocks of one owner in one state. `owner` is the label given to the pool; `age` is in seconds, from the moment
    when the owner got its first block or, for a ticket's blocks, from their last change of state."""

    owner: str
    state: BlockState
    blocks: int
    age: float
    ticket: TicketId | None = None


@dataclass(frozen=True, slots=True)
class Ledger:
    """A snapshot. A shared block stands in the entry of each of its owners, so that IN_USE entries may add up to more
    than `counts[IN_USE]`; every other entry counts a block once."""

    total: int
    counts: Mapping[BlockState, int]
    entries: tuple[LedgerEntry, ...]

    @property
    def balanced(self) -> bool:
        return sum(self.counts.values()) == self.total and min(self.counts.values()) >= 0
