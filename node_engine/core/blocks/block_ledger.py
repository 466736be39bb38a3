"""Block states, and the block ledger: a balanced snapshot that names the owner of every block."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from baton.types import TicketId


class BlockState(Enum):
    """States of a block of the arena; `BlockPool` owns the transitions."""

    FREE = "free"
    RESERVED = "reserved"  # set aside for the KV writer of a ticket
    WRITING = "writing"  # the KV writer has begun
    IN_USE = "in_use"  # referenced by at least one owner
    CACHED = "cached"  # no references, in the prefix index; evictable
    QUARANTINED = "quarantined"  # the hand-off failed, but its KV writer may still write


class BlockLedgerError(AssertionError):
    """An illegal transition or a ledger that does not balance: a bug in Baton, not bad input."""


def require_invariant(holds: bool, what: str) -> None:
    """Raise BlockLedgerError unless `holds`. Unlike an assert, it also runs under `python -O`."""
    if not holds:
        raise BlockLedgerError(f"the books do not agree: {what}")


@dataclass(frozen=True, slots=True)
class BlockLedgerEntry:
    """The blocks of one owner in one state."""

    owner: str  # the label under which the references were taken
    state: BlockState
    num_blocks: int
    # Since the owner got its first block or, for a ticket, since the last change of state.
    age_seconds: float
    ticket_id: TicketId | None = None  # None for blocks IN_USE


@dataclass(frozen=True, slots=True)
class BlockLedger:
    """A snapshot of all blocks, by state and by owner.

    A shared block is counted in the entry of each of its owners, so IN_USE entries may add up to
    more than `counts[IN_USE]`. Entries in other states count each block once.
    """

    num_blocks: int
    counts: Mapping[BlockState, int]
    entries: tuple[BlockLedgerEntry, ...]

    @property
    def is_balanced(self) -> bool:
        return sum(self.counts.values()) == self.num_blocks and min(self.counts.values()) >= 0
