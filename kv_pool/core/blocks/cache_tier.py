"""A tier: blocks of one memory, an index over them, pins, and an evictor that makes room. The
pool's memory is one, its disk another, and so is what a trace is replayed through.

Blocks come from `take`, which evicts if it must; they are the caller's until they are inserted or
given back. Whoever holds a path that must not go pins its deepest block.
"""

from array import array
from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np

from baton.kv.block_hash import BlockHash
from kv_pool.core.eviction.evictor import Evictor
from kv_pool.core.index.prompt_chain import PromptChain, index_key_of
from kv_pool.core.index.radix_index import ROOT, RadixIndex
from kv_pool.core.ledger import require_invariant

BlockListener = Callable[[int], None]


class CacheTier:
    """`num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int, evictor: Evictor) -> None:
        self.num_blocks = num_blocks
        self.index = RadixIndex(num_blocks, block_size)
        self.num_evictions = 0
        self._evictor = evictor
        self._insert_listeners: list[BlockListener] = []
        self._removal_listeners: list[BlockListener] = []
        self._pin_counts = array("i", bytes(4 * num_blocks))
        self._used_flags = bytearray(num_blocks)
        self._used_array = np.frombuffer(
            self._used_flags, dtype=np.uint8
        )  # the same memory, for many blocks at once
        self._free_heap: list[
            int
        ] = []  # a heap of those below `_first_unused`: lowest first keeps runs together
        self._first_unused = 0  # the first that was never used

    def add_listeners(
        self, gained: BlockListener | None = None, losing: BlockListener | None = None
    ) -> None:
        """`gained` is told each block that has come into the index, `losing` each that is about to
        leave it, while it is still there."""
        self._insert_listeners += [gained] if gained else []
        self._removal_listeners += [losing] if losing else []

    @property
    def num_free(self) -> int:
        return len(self._free_heap) + self.num_blocks - self._first_unused

    # reading

    def match_prefix(self, chain: PromptChain, now: float, most: int | None = None) -> "array[int]":
        """The longest prefix that is here, as a use of its blocks."""
        path = self.index.match_prefix(chain, most)
        if path:
            self._evictor.on_path_used(path, now)
            self._used_array[np.frombuffer(path, dtype=np.int32)] = 1
        return path

    def has_been_used(self, block: int) -> bool:
        """Whether anybody has found it since it was inserted."""
        return bool(self._used_flags[block])

    def pin(self, block: int) -> None:
        """Keep `block` and all before it, until `unpin`."""
        require_invariant(block in self.index, f"block {block} is pinned and is not in the index")
        self._pin_counts[block] += 1
        self._evictor.remove_candidate(block)

    def unpin(self, block: int) -> None:
        require_invariant(self._pin_counts[block] > 0, f"block {block} is not pinned")
        self._pin_counts[block] -= 1
        self._update_candidate(block)

    def pin_count(self, block: int) -> int:
        """On the block itself."""
        return self._pin_counts[block]

    # writing

    def allocate_blocks(self, count: int, now: float) -> list[int]:
        """Up to `count` blocks; fewer when the rest is pinned."""
        taken: list[int] = []
        while len(taken) < count:
            if not self.num_free and not self._evict_block(now):
                break
            taken.append(heappop(self._free_heap) if self._free_heap else self._allocate_unused())
        return taken

    def free_block(self, block: int) -> None:
        require_invariant(
            block not in self.index, f"block {block} is given back and is in the index"
        )
        heappush(self._free_heap, block)

    def insert_block(
        self, block: int, chain: PromptChain, number: int, parent: int, now: float
    ) -> bool:
        """Make a taken block findable; see RadixIndex.insert."""
        if not self.index.insert_block(block, chain, number, parent):
            return False
        self._after_insert(block, parent, now)
        return True

    def restore_block(
        self, block: int, name: bytes, tokens: bytes, parent: int, root: BlockHash, now: float
    ) -> bool:
        """`insert_block` of a free block, for what was here in an earlier life. Afterwards,
        `finish_restore`."""
        if block in self.index or not self.index.add_block(block, name, tokens, parent, root):
            return False
        self._after_insert(block, parent, now)
        return True

    def finish_restore(self) -> None:
        self._first_unused = 1 + max(
            (block for block in range(self.num_blocks) if block in self.index), default=-1
        )
        self._free_heap = [block for block in range(self._first_unused) if block not in self.index]

    def remove_subtree(self, block: int) -> None:
        """`remove_leaf` a block with all that follow it, unless somebody pins one of them."""
        branch = self.index.list_subtree(block) if block in self.index else []
        if not any(self._pin_counts[one] for one in branch):
            for one in branch:
                self.remove_leaf(one)

    def remove_leaf(self, block: int) -> None:
        """Remove a leaf that nobody pins, and free it."""
        require_invariant(not self._pin_counts[block], f"block {block} is dropped and is pinned")
        self._evictor.remove_candidate(block)
        self._remove_block(block)

    def check(self) -> None:
        """Raise LedgerError unless the books agree. Looks at everything: for tests."""
        self.index.check()
        require_invariant(
            len(set(self._free_heap)) == len(self._free_heap), "a block is free twice"
        )
        free = (*self._free_heap, *range(self._first_unused, self.num_blocks))
        require_invariant(
            not any(block in self.index for block in free), "a free block is in the index"
        )
        require_invariant(
            max(self._free_heap, default=-1) < self._first_unused,
            "a block is free and was never used",
        )
        pinned = [block for block in range(self.num_blocks) if self._pin_counts[block]]
        require_invariant(
            all(block in self.index for block in pinned), "a pinned block is not in the index"
        )
        require_invariant(min(self._pin_counts, default=0) >= 0, "pins below 0")

    def _after_insert(self, block: int, parent: int, now: float) -> None:
        if parent != ROOT:
            self._evictor.remove_candidate(parent)
            self._evictor.on_child_added(parent)
        self._evictor.on_block_inserted(
            block, index_key_of(self.index.block_hash(block)), self.index.depth(block), now
        )
        self._update_candidate(block)
        self._used_flags[block] = 0
        for tell in self._insert_listeners:
            tell(block)

    def _allocate_unused(self) -> int:
        self._first_unused += 1
        return self._first_unused - 1

    def _evict_block(self, now: float) -> bool:
        block = self._evictor.choose_victim(now)
        if block is None:
            return False
        self.num_evictions += 1
        self._remove_block(block)
        return True

    def _remove_block(self, block: int) -> None:
        for tell in self._removal_listeners:
            tell(block)
        parent, key = self.index.parent(block), index_key_of(self.index.block_hash(block))
        self.index.remove_leaf(block)
        self._evictor.on_block_removed(block, key)
        heappush(self._free_heap, block)
        if parent != ROOT:
            self._update_candidate(parent)

    def _update_candidate(self, block: int) -> None:
        if not self._pin_counts[block] and self.index.is_leaf(block):
            self._evictor.add_candidate(block)
