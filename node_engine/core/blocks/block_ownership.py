"""The two books of the block pool: one state per block, and who holds a reference on what."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from baton.types import BlockIndex
from node_engine.core.blocks.block_ledger import (
    BlockLedgerEntry,
    BlockLedgerError,
    BlockState,
    require_invariant,
)


@dataclass(slots=True)
class _OwnerBlocks:
    since: float
    blocks: set[BlockIndex] = field(default_factory=set)


class BlockOwnership:
    """Every reference is held under an owner's label, once per (owner, block), so that nothing can
    be released twice and the ledger can name everybody. `clock` gives the ages, in seconds."""

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
            raise BlockLedgerError(f"{owner} holds block {block} already")
        holding.blocks.add(block)
        self._ref_counts[block] += 1

    def remove_reference(self, block: BlockIndex, owner: str) -> bool:
        """Whether that was the last reference."""
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
            require_invariant(bool(holding.blocks), f"{owner} is on the books and holds nothing")
            for block in holding.blocks:
                refs[block] += 1
        require_invariant(refs == self._ref_counts, "references are not what the owners hold")
        for number, state in enumerate(self._states):
            require_invariant(
                (refs[number] > 0) == (state is BlockState.IN_USE),
                f"{refs[number]} owners of a {state} block",
            )
        require_invariant(
            {state: self._states.count(state) for state in BlockState} == self._counts_by_state,
            "counts by state",
        )
