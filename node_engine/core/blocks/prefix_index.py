"""Finds blocks by content: a hash index for whole blocks, sorted siblings for partial matches.

A block is found by its BlockHash, which covers its whole prefix. Its tokens and its parent hash are
compared as well, so that a hash collision cannot return the wrong KV. The token tuples of all
children of one parent are kept sorted: the child with the longest common prefix is then a neighbour
of the insertion point of the requested tokens (binary search).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from baton.kv.block_hash import BlockHash
from baton.types import BlockIndex
from node_engine.core.blocks.block_ownership import require_invariant


@dataclass(frozen=True, slots=True)
class IndexedBlock:
    """The content of a block: its tokens after the prefix that `parent_hash` names."""

    block_hash: BlockHash
    parent_hash: BlockHash
    token_ids: tuple[int, ...]


def _ignore_entry(entry: IndexedBlock) -> None:
    """Default listener."""


class PrefixIndex:
    """Blocks by content.

    Several blocks may hold the same content (*duplicates*). Look-ups return the first one; when it
    is removed, the next one takes its place.
    """

    def __init__(
        self,
        on_content_added: Callable[[IndexedBlock], None] = _ignore_entry,
        on_content_removed: Callable[[IndexedBlock], None] = _ignore_entry,
    ) -> None:
        """The callbacks receive each content that becomes findable or stops being findable."""
        self._on_content_added, self._on_content_removed = on_content_added, on_content_removed
        self._entries: dict[BlockIndex, IndexedBlock] = {}
        self._blocks_by_hash: dict[BlockHash, list[BlockIndex]] = {}
        # Tokens and hashes of the blocks that follow a parent, by parent hash, sorted.
        self._children: dict[BlockHash, list[tuple[tuple[int, ...], BlockHash]]] = {}

    def __contains__(self, block: BlockIndex) -> bool:
        return block in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get_entry(self, block: BlockIndex) -> IndexedBlock:
        return self._entries[block]

    def list_blocks_with_hash(self, block_hash: BlockHash) -> Sequence[BlockIndex]:
        """Blocks with this hash; the first one is the one that look-ups return."""
        return self._blocks_by_hash.get(block_hash, ())

    def add_block(self, block: BlockIndex, entry: IndexedBlock) -> None:
        """Make `block` findable. Ignored if another content already has the same hash."""
        duplicates = self._blocks_by_hash.setdefault(entry.block_hash, [])
        if duplicates and self._entries[duplicates[0]] != entry:
            return
        if not duplicates:
            insort(
                self._children.setdefault(entry.parent_hash, []),
                (entry.token_ids, entry.block_hash),
            )
            self._on_content_added(entry)
        duplicates.append(block)
        self._entries[block] = entry

    def remove_block(self, block: BlockIndex) -> None:
        entry = self._entries.pop(block)
        duplicates = self._blocks_by_hash[entry.block_hash]
        duplicates.remove(block)
        if duplicates:
            return
        del self._blocks_by_hash[entry.block_hash]
        siblings = self._children[entry.parent_hash]
        del siblings[bisect_left(siblings, (entry.token_ids, entry.block_hash))]
        if not siblings:
            del self._children[entry.parent_hash]
        self._on_content_removed(entry)

    def iter_contents(self) -> Iterator[IndexedBlock]:
        """Every indexed content, each once."""
        return (self._entries[duplicates[0]] for duplicates in self._blocks_by_hash.values())

    def find_block(
        self, block_hash: BlockHash, parent_hash: BlockHash, tokens: Sequence[int]
    ) -> BlockIndex | None:
        """The block that holds exactly `tokens` after the prefix `parent_hash`."""
        duplicates = self._blocks_by_hash.get(block_hash)
        if duplicates is None:
            return None
        entry = self._entries[duplicates[0]]
        return (
            duplicates[0]
            if entry.parent_hash == parent_hash and entry.token_ids == tuple(tokens)
            else None
        )

    def find_partial_match(
        self, parent_hash: BlockHash, tokens: Sequence[int]
    ) -> tuple[BlockIndex, int] | None:
        """The child of `parent_hash` that shares the most leading tokens with `tokens`.

        Returns the block and the number of shared tokens, or None if no child shares any.
        """
        siblings = self._children.get(parent_hash, [])
        requested = tuple(tokens)
        position = bisect_left(siblings, (requested,))
        best: tuple[BlockIndex, int] | None = None
        for candidate, block_hash in siblings[max(0, position - 1) : position + 1]:
            shared = common_prefix_length(candidate, requested)
            if shared > (best[1] if best else 0):
                best = (self._blocks_by_hash[block_hash][0], shared)
        return best

    def check_invariants(self) -> None:
        """Raise BlockLedgerError if the three tables do not agree."""
        require_invariant(
            sum(len(duplicates) for duplicates in self._blocks_by_hash.values())
            == len(self._entries),
            "indexed blocks",
        )
        for block_hash, duplicates in self._blocks_by_hash.items():
            require_invariant(
                len(set(duplicates)) == len(duplicates) > 0, f"duplicates {duplicates}"
            )
            require_invariant(
                {self._entries[block].block_hash for block in duplicates} == {block_hash},
                f"hash of {duplicates}",
            )
            require_invariant(
                len({self._entries[block] for block in duplicates}) == 1, f"content of {duplicates}"
            )
        require_invariant(
            sum(len(siblings) for siblings in self._children.values()) == len(self._blocks_by_hash),
            "children",
        )
        for parent, siblings in self._children.items():
            require_invariant(siblings == sorted(siblings), "order of siblings")
            for tokens, block_hash in siblings:
                entry = self._entries[self._blocks_by_hash[block_hash][0]]
                require_invariant(
                    (entry.parent_hash, entry.token_ids) == (parent, tokens),
                    "a child under the wrong parent",
                )


def common_prefix_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for position, (ours, theirs) in enumerate(zip(left, right, strict=False)):
        if ours != theirs:
            return position
    return min(len(left), len(right))
