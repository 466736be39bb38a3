"""Which blocks hold which tokens: a hash index for whole blocks and sorted siblings for a shared beginning.

A block is found by its BlockHash, which names its whole prefix; its tokens and its parent are compared as well, so
that not even a collision can serve the wrong KV. Under one parent the token tuples of all children are kept sorted:
the child with the longest common beginning is then a neighbour of the place where the wanted tokens would stand
(binary search).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from baton.block_hash import BlockHash
from baton.types import BlockIndex
from node_engine.core.ledger import require


@dataclass(frozen=True, slots=True)
class IndexedBlock:
    hash: BlockHash
    parent: BlockHash
    tokens: tuple[int, ...]


def _ignore(entry: IndexedBlock) -> None:
    """For an index that nobody follows."""


class PrefixIndex:
    """Blocks by content. Several blocks may hold the same content (*twins*); the first one is found, the others
    follow when it is removed. `gained` and `lost` are called with each content that becomes findable or ceases to be
    so."""

    def __init__(
        self, gained: Callable[[IndexedBlock], None] = _ignore, lost: Callable[[IndexedBlock], None] = _ignore
    ) -> None:
        self._gained, self._lost = gained, lost
        self._entries: dict[BlockIndex, IndexedBlock] = {}
        self._twins: dict[BlockHash, list[BlockIndex]] = {}
        self._children: dict[BlockHash, list[tuple[tuple[int, ...], BlockHash]]] = {}  # by parent, sorted

    def __contains__(self, block: BlockIndex) -> bool:
        return block in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, block: BlockIndex) -> IndexedBlock:
        return self._entries[block]

    def twins(self, name: BlockHash) -> Sequence[BlockIndex]:
        """Blocks with that content, the one that look-ups find first."""
        return self._twins.get(name, ())

    def add(self, block: BlockIndex, entry: IndexedBlock) -> None:
        """Make `block` findable. A colliding hash (same name, other content) is left alone."""
        twins = self._twins.setdefault(entry.hash, [])
        if twins and self._entries[twins[0]] != entry:
            return
        if not twins:
            insort(self._children.setdefault(entry.parent, []), (entry.tokens, entry.hash))
            self._gained(entry)
        twins.append(block)
        self._entries[block] = entry

    def remove(self, block: BlockIndex) -> None:
        entry = self._entries.pop(block)
        twins = self._twins[entry.hash]
        twins.remove(block)
        if twins:
            return
        del self._twins[entry.hash]
        siblings = self._children[entry.parent]
        del siblings[bisect_left(siblings, (entry.tokens, entry.hash))]
        if not siblings:
            del self._children[entry.parent]
        self._lost(entry)

    def contents(self) -> Iterator[IndexedBlock]:
        """Each content once."""
        return (self._entries[twins[0]] for twins in self._twins.values())

    def find(self, name: BlockHash, parent: BlockHash, tokens: Sequence[int]) -> BlockIndex | None:
        """The block that holds exactly `tokens` after `parent`."""
        twins = self._twins.get(name)
        if twins is None:
            return None
        entry = self._entries[twins[0]]
        return twins[0] if entry.parent == parent and entry.tokens == tuple(tokens) else None

    def find_beginning(self, parent: BlockHash, tokens: Sequence[int]) -> tuple[BlockIndex, int] | None:
        """The child of `parent` that shares the longest beginning with `tokens`, and how many tokens of it; None if
        no child shares even one."""
        siblings = self._children.get(parent, [])
        wanted = tuple(tokens)
        place = bisect_left(siblings, (wanted,))
        best: tuple[BlockIndex, int] | None = None
        for candidate, name in siblings[max(0, place - 1) : place + 1]:
            shared = common_beginning(candidate, wanted)
            if shared > (best[1] if best else 0):
                best = (self._twins[name][0], shared)
        return best

    def check(self) -> None:
        """Raise LedgerError if the three tables do not tell the same story."""
        require(sum(len(twins) for twins in self._twins.values()) == len(self._entries), "indexed blocks")
        for name, twins in self._twins.items():
            require(len(set(twins)) == len(twins) > 0, f"twins {twins}")
            require({self._entries[block].hash for block in twins} == {name}, f"hash of {twins}")
            require(len({self._entries[block] for block in twins}) == 1, f"content of {twins}")
        require(sum(len(siblings) for siblings in self._children.values()) == len(self._twins), "children")
        for parent, siblings in self._children.items():
            require(siblings == sorted(siblings), "order of siblings")
            for tokens, name in siblings:
                entry = self._entries[self._twins[name][0]]
                require((entry.parent, entry.tokens) == (parent, tokens), "a child under the wrong parent")


def common_beginning(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for position, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return position
    return min(len(left), len(right))
