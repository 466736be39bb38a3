"""Which blocks hold which tokens: a hash index for whole blocks and sorted siblings for a shared
beginning.

A block is found by its BlockHash, which names its whole prefix; its tokens and its parent are
compared as well, so that not even a collision can serve the wrong KV. Under one parent the token
tuples of all children are kept sorted: the child with the longest common beginning is then a
neighbour of the place where the wanted tokens would stand (binary search).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from baton.kv.block_hash import BlockHash
from baton.types import BlockIndex
from node_engine.core.blocks.block_ledger import require_invariant


@dataclass(frozen=True, slots=True)
class IndexedBlock:
    block_hash: BlockHash
    parent_hash: BlockHash
    token_ids: tuple[int, ...]


def _ignore_entry(entry: IndexedBlock) -> None:
    """For an index that nobody follows."""


class PrefixIndex:
    """Blocks by content. Several blocks may hold the same content (*twins*); the first one is
    found, the others follow when it is removed. `gained` and `lost` are called with each content
    that becomes findable or ceases to be so."""

    def __init__(
        self,
        gained: Callable[[IndexedBlock], None] = _ignore_entry,
        lost: Callable[[IndexedBlock], None] = _ignore_entry,
    ) -> None:
        self._on_content_added, self._on_content_removed = gained, lost
        self._entries: dict[BlockIndex, IndexedBlock] = {}
        self._blocks_by_hash: dict[BlockHash, list[BlockIndex]] = {}
        self._children: dict[
            BlockHash, list[tuple[tuple[int, ...], BlockHash]]
        ] = {}  # by parent, sorted

    def __contains__(self, block: BlockIndex) -> bool:
        return block in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get_entry(self, block: BlockIndex) -> IndexedBlock:
        return self._entries[block]

    def list_blocks_with_hash(self, name: BlockHash) -> Sequence[BlockIndex]:
        """Blocks with that content, the one that look-ups find first."""
        return self._blocks_by_hash.get(name, ())

    def add_block(self, block: BlockIndex, entry: IndexedBlock) -> None:
        """Make `block` findable. A colliding hash (same name, other content) is left alone."""
        twins = self._blocks_by_hash.setdefault(entry.block_hash, [])
        if twins and self._entries[twins[0]] != entry:
            return
        if not twins:
            insort(
                self._children.setdefault(entry.parent_hash, []),
                (entry.token_ids, entry.block_hash),
            )
            self._on_content_added(entry)
        twins.append(block)
        self._entries[block] = entry

    def remove_block(self, block: BlockIndex) -> None:
        entry = self._entries.pop(block)
        twins = self._blocks_by_hash[entry.block_hash]
        twins.remove(block)
        if twins:
            return
        del self._blocks_by_hash[entry.block_hash]
        siblings = self._children[entry.parent_hash]
        del siblings[bisect_left(siblings, (entry.token_ids, entry.block_hash))]
        if not siblings:
            del self._children[entry.parent_hash]
        self._on_content_removed(entry)

    def iter_contents(self) -> Iterator[IndexedBlock]:
        """Each content once."""
        return (self._entries[twins[0]] for twins in self._blocks_by_hash.values())

    def find_block(
        self, name: BlockHash, parent: BlockHash, tokens: Sequence[int]
    ) -> BlockIndex | None:
        """The block that holds exactly `tokens` after `parent`."""
        twins = self._blocks_by_hash.get(name)
        if twins is None:
            return None
        entry = self._entries[twins[0]]
        return (
            twins[0] if entry.parent_hash == parent and entry.token_ids == tuple(tokens) else None
        )

    def find_partial_match(
        self, parent: BlockHash, tokens: Sequence[int]
    ) -> tuple[BlockIndex, int] | None:
        """The child of `parent` that shares the longest beginning with `tokens`, and how many
        tokens of it; None if no child shares even one."""
        siblings = self._children.get(parent, [])
        wanted = tuple(tokens)
        place = bisect_left(siblings, (wanted,))
        best: tuple[BlockIndex, int] | None = None
        for candidate, name in siblings[max(0, place - 1) : place + 1]:
            shared = common_prefix_length(candidate, wanted)
            if shared > (best[1] if best else 0):
                best = (self._blocks_by_hash[name][0], shared)
        return best

    def check_invariants(self) -> None:
        """Raise LedgerError if the three tables do not tell the same story."""
        require_invariant(
            sum(len(twins) for twins in self._blocks_by_hash.values()) == len(self._entries),
            "indexed blocks",
        )
        for name, twins in self._blocks_by_hash.items():
            require_invariant(len(set(twins)) == len(twins) > 0, f"twins {twins}")
            require_invariant(
                {self._entries[block].block_hash for block in twins} == {name}, f"hash of {twins}"
            )
            require_invariant(
                len({self._entries[block] for block in twins}) == 1, f"content of {twins}"
            )
        require_invariant(
            sum(len(siblings) for siblings in self._children.values()) == len(self._blocks_by_hash),
            "children",
        )
        for parent, siblings in self._children.items():
            require_invariant(siblings == sorted(siblings), "order of siblings")
            for tokens, name in siblings:
                entry = self._entries[self._blocks_by_hash[name][0]]
                require_invariant(
                    (entry.parent_hash, entry.token_ids) == (parent, tokens),
                    "a child under the wrong parent",
                )


def common_prefix_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for position, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return position
    return min(len(left), len(right))
