"""The two books of the block pool: one state per block, and who holds a reference on what."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from baton.types import BlockIndex
from node_engine.core.ledger import BlockState, LedgerEntry, LedgerError, require


@dataclass(slots=True)
class _Holding:
    since: float
    blocks: set[BlockIndex] = field(default_factory=set)


class BlockAccounts:
    """Every reference is held under an owner's label, once per (owner, block), so that nothing can be released twice
    and the ledger can name everybody. `clock` gives the ages, in seconds."""

    def __init__(self, num_blocks: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._state = [BlockState.FREE] * num_blocks
        self._count = dict.fromkeys(BlockState, 0) | {BlockState.FREE: num_blocks}
        self._refs = [0] * num_blocks
        self._holdings: dict[str, _Holding] = {}

    def state(self, block: BlockIndex) -> BlockState:
        return self._state[block]

    def refs(self, block: BlockIndex) -> int:
        return self._refs[block]

    def count(self, state: BlockState) -> int:
        return self._count[state]

    def counts(self) -> dict[BlockState, int]:
        return dict(self._count)

    def held_by(self, owner: str) -> int:
        holding = self._holdings.get(owner)
        return len(holding.blocks) if holding else 0

    def move(self, block: BlockIndex, before: BlockState, after: BlockState) -> None:
        if self._state[block] is not before:
            raise LedgerError(f"block {block} is {self._state[block].value}, not {before.value}")
        self._state[block] = after
        self._count[before] -= 1
        self._count[after] += 1

    def hold(self, block: BlockIndex, owner: str) -> None:
        holding = self._holdings.get(owner)
        if holding is None:
            holding = self._holdings[owner] = _Holding(self._clock())
        if block in holding.blocks:
            raise LedgerError(f"{owner} holds block {block} already")
        holding.blocks.add(block)
        self._refs[block] += 1

    def let_go(self, block: BlockIndex, owner: str) -> bool:
        """Whether that was the last reference."""
        holding = self._holdings.get(owner)
        if holding is None or block not in holding.blocks:
            raise LedgerError(f"{owner} does not hold block {block}, which is {self._state[block].value}")
        holding.blocks.remove(block)
        if not holding.blocks:
            del self._holdings[owner]
        self._refs[block] -= 1
        return self._refs[block] == 0

    def entries(self) -> Iterator[LedgerEntry]:
        now = self._clock()
        for owner, holding in self._holdings.items():
            yield LedgerEntry(owner, BlockState.IN_USE, len(holding.blocks), now - holding.since)

    def check(self) -> None:
        refs = [0] * len(self._state)
        for owner, holding in self._holdings.items():
            require(bool(holding.blocks), f"{owner} is on the books and holds nothing")
            for block in holding.blocks:
                refs[block] += 1
        require(refs == self._refs, "references are not what the owners hold")
        for number, state in enumerate(self._state):
            require((refs[number] > 0) == (state is BlockState.IN_USE), f"{refs[number]} owners of a {state} block")
        require({state: self._state.count(state) for state in BlockState} == self._count, "counts by state")
