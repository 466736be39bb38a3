"""Block states and reference counts: every reference belongs to an owner with a label.

Block states, and the block ledger: a balanced snapshot that names the owner of every block.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from baton.types import BlockIndex, TicketId


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
        raise BlockLedgerError(f"the block ledger is inconsistent: {what}")


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


@dataclass(slots=True)
class _OwnerBlocks:
    since: float  # clock time, in seconds, of the first reference
    blocks: set[BlockIndex] = field(default_factory=set)


class BlockOwnership:
    """The state of each block and the references that owners hold on it.

    An owner holds at most one reference on a block, so a second release is detected and the ledger
    can name every owner.
    """

    def __init__(self, num_blocks: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._states = [BlockState.FREE] * num_blocks
        self._counts_by_state = dict.fromkeys(BlockState, 0) | {BlockState.FREE: num_blocks}
        self._ref_counts = [0] * num_blocks
        self._blocks_by_owner: dict[str, _OwnerBlocks] = {}

    def get_block_state(self, block: BlockIndex) -> BlockState:
        return self._states[block]

    def get_ref_count(self, block: BlockIndex) -> int:
        return self._ref_counts[block]

    def count_blocks(self, state: BlockState) -> int:
        return self._counts_by_state[state]

    def count_blocks_by_state(self) -> dict[BlockState, int]:
        return dict(self._counts_by_state)

    def count_blocks_held_by(self, owner: str) -> int:
        holding = self._blocks_by_owner.get(owner)
        return len(holding.blocks) if holding else 0

    def change_state(self, block: BlockIndex, before: BlockState, after: BlockState) -> None:
        if self._states[block] is not before:
            raise BlockLedgerError(
                f"block {block} is {self._states[block].value}, not {before.value}"
            )
        self._states[block] = after
        self._counts_by_state[before] -= 1
        self._counts_by_state[after] += 1

    def add_reference(self, block: BlockIndex, owner: str) -> None:
        holding = self._blocks_by_owner.get(owner)
        if holding is None:
            holding = self._blocks_by_owner[owner] = _OwnerBlocks(self._clock())
        if block in holding.blocks:
            raise BlockLedgerError(f"{owner} already holds block {block}")
        holding.blocks.add(block)
        self._ref_counts[block] += 1

    def remove_reference(self, block: BlockIndex, owner: str) -> bool:
        """Remove a reference; returns whether it was the last one on the block."""
        holding = self._blocks_by_owner.get(owner)
        if holding is None or block not in holding.blocks:
            raise BlockLedgerError(
                f"{owner} does not hold block {block}, which is {self._states[block].value}"
            )
        holding.blocks.remove(block)
        if not holding.blocks:
            del self._blocks_by_owner[owner]
        self._ref_counts[block] -= 1
        return self._ref_counts[block] == 0

    def iter_ledger_entries(self) -> Iterator[BlockLedgerEntry]:
        now = self._clock()
        for owner, holding in self._blocks_by_owner.items():
            yield BlockLedgerEntry(
                owner, BlockState.IN_USE, len(holding.blocks), now - holding.since
            )

    def check_invariants(self) -> None:
        refs = [0] * len(self._states)
        for owner, holding in self._blocks_by_owner.items():
            require_invariant(bool(holding.blocks), f"owner {owner} holds no block")
            for block in holding.blocks:
                refs[block] += 1
        require_invariant(
            refs == self._ref_counts, "references differ from the blocks that owners hold"
        )
        for number, state in enumerate(self._states):
            require_invariant(
                (refs[number] > 0) == (state is BlockState.IN_USE),
                f"{refs[number]} owners of a {state} block",
            )
        require_invariant(
            {state: self._states.count(state) for state in BlockState} == self._counts_by_state,
            "counts by state",
        )
