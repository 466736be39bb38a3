"""What a pool says about its blocks: the states, and a snapshot that balances and names every
holder."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class PoolBlockState(Enum):
    """States of a pool block. IN_USE and QUARANTINED count whole paths: who pins a block pins what
    it rests on."""

    FREE = "free"
    WRITING = "writing"  # given to a publisher, findable by nobody
    CACHED = "cached"  # findable, pinned by nobody
    IN_USE = "in_use"  # pinned by an attachment that lives
    QUARANTINED = (
        "quarantined"  # pinned or written by attachments of which nobody knows whether they live
    )


class PoolLedgerError(AssertionError):
    """An illegal transition or an account that does not balance: a programming error, never a
    caller's."""


def require_invariant(holds: bool, what: str) -> None:
    """An invariant of the books; unlike an assert it survives `python -O`."""
    if not holds:
        raise PoolLedgerError(f"the pool's books do not agree: {what}")


@dataclass(frozen=True, slots=True)
class PoolLedgerEntry:
    """Blocks of one attachment in one state, and the seconds since its first of that kind, or since
    it became doubtful."""

    owner: str
    state: PoolBlockState
    num_blocks: int
    age_seconds: float


@dataclass(frozen=True, slots=True)
class PoolLedger:
    """A snapshot. A path pinned by several stands in the entry of each, so entries of IN_USE and
    QUARANTINED may add up to more than their counts."""

    num_blocks: int
    counts: Mapping[PoolBlockState, int]
    entries: tuple[PoolLedgerEntry, ...]

    @property
    def is_balanced(self) -> bool:
        return sum(self.counts.values()) == self.num_blocks and min(self.counts.values()) >= 0
