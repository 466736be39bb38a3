"""The ledger of a pool: states of its blocks, and a balanced snapshot that names every owner."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class PoolBlockState(Enum):
    """States of a pool block.

    IN_USE and QUARANTINED count whole paths: a client that pins a block also keeps all blocks
    before it in the prompt.
    """

    FREE = "free"
    WRITING = "writing"  # reserved for a publication, not findable
    CACHED = "cached"  # findable, not pinned
    IN_USE = "in_use"  # pinned by a live attachment
    QUARANTINED = "quarantined"  # pinned or being written by suspect attachments only


class PoolLedgerError(AssertionError):
    """An illegal state transition or an unbalanced ledger: a bug of the pool, not of a client."""


def require_invariant(condition: bool, description: str) -> None:
    """Raise PoolLedgerError unless `condition` holds; also under `python -O`, unlike `assert`."""
    if not condition:
        raise PoolLedgerError(f"the pool's ledger is inconsistent: {description}")


@dataclass(frozen=True, slots=True)
class PoolLedgerEntry:
    """The blocks of one owner in one state."""

    owner: str
    state: PoolBlockState
    num_blocks: int
    age_seconds: float  # since the attachment became live, or suspect


@dataclass(frozen=True, slots=True)
class PoolLedger:
    """A snapshot of all blocks by state and by owner.

    A path that several clients pin is counted in the entry of each of them, so the entries of
    IN_USE and QUARANTINED may add up to more than `counts`.
    """

    num_blocks: int
    counts: Mapping[PoolBlockState, int]
    entries: tuple[PoolLedgerEntry, ...]

    @property
    def is_balanced(self) -> bool:
        return sum(self.counts.values()) == self.num_blocks and min(self.counts.values()) >= 0
