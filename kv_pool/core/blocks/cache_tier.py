"""A cache tier: the blocks of one memory with a radix index, pins, a free list and an evictor.

The pool's memory is one tier and its disk another; replaying a trace uses one as well.
`allocate_blocks` evicts blocks if it must; allocated blocks belong to the caller until it inserts
or frees them. To keep a whole path from eviction, pin its deepest block.
"""

from array import array
from collections.abc import Callable

import numpy as np

from baton.kv.blocks import BlockHash
from kv_pool.core.blocks.free_list import FreeList
from kv_pool.core.eviction.evictor import Evictor
from kv_pool.core.index.radix_index import ROOT, PromptChain, RadixIndex, index_key_of
from kv_pool.core.ledger import require_invariant

BlockListener = Callable[[int], None]


class CacheTier:
    """A tier of `num_blocks` blocks of `block_size` tokens each. All times are in seconds."""

    def __init__(self, num_blocks: int, block_size: int, evictor: Evictor) -> None:
        self.num_blocks = num_blocks
        self.index = RadixIndex(num_blocks, block_size)
        self.num_evictions = 0
        self._evictor = evictor
        self._insert_listeners: list[BlockListener] = []
        self._removal_listeners: list[BlockListener] = []
        self.free_list = FreeList(num_blocks)
        # By block: the pins on the block itself, without those on blocks after it.
        self.pin_counts = array("i", bytes(4 * num_blocks))
        # By block: 1 if a look-up has found it since it was inserted, else 0.
        self.used_flags = bytearray(num_blocks)
        # The same memory as an array, to set many flags at once.
        self._used_array = np.frombuffer(self.used_flags, dtype=np.uint8)

    def add_listeners(
        self, on_insert: BlockListener | None = None, on_remove: BlockListener | None = None
    ) -> None:
        """Call `on_insert` after a block is indexed, and `on_remove` just before one is removed."""
        self._insert_listeners += [on_insert] if on_insert else []
        self._removal_listeners += [on_remove] if on_remove else []

    # reading

    def match_prefix(
        self, chain: PromptChain, now: float, max_blocks: int | None = None
    ) -> "array[int]":
        """Return the blocks of the longest prefix in this tier, and record a use of each."""
        path = self.index.match_prefix(chain, max_blocks)
        if path:
            self._evictor.on_path_used(path, now)
            self._used_array[np.frombuffer(path, dtype=np.int32)] = 1
        return path

    def pin(self, block: int) -> None:
        """Keep `block` and all blocks before it in its prompt from eviction, until `unpin`."""
        require_invariant(block in self.index, f"block {block} is pinned and is not in the index")
        self.pin_counts[block] += 1
        self._evictor.remove_candidate(block)

    def unpin(self, block: int) -> None:
        require_invariant(self.pin_counts[block] > 0, f"block {block} is not pinned")
        self.pin_counts[block] -= 1
        self._update_candidate(block)

    # writing

    def allocate_blocks(self, count: int, now: float) -> list[int]:
        """Allocate up to `count` blocks, evicting others; fewer if the rest is pinned."""
        allocated: list[int] = []
        while len(allocated) < count:
            if not self.free_list and not self._evict_block(now):
                break
            allocated.append(self.free_list.take_block())
        return allocated

    def free_block(self, block: int) -> None:
        require_invariant(block not in self.index, f"block {block} is freed and is in the index")
        self.free_list.add_block(block)

    def insert_block(
        self, block: int, chain: PromptChain, number: int, parent: int, now: float
    ) -> bool:
        """Make an allocated block findable; see RadixIndex.insert_block."""
        if not self.index.insert_block(block, chain, number, parent):
            return False
        self._after_insert(block, parent, now)
        return True

    def restore_block(
        self,
        block: int,
        block_hash: bytes,
        tokens: bytes,
        parent: int,
        root: BlockHash,
        now: float,
    ) -> bool:
        """Index a free block that this tier held before a restart.

        Returns False if the index already has the block or refuses it. Call `finish_restore` when
        all blocks are restored.
        """
        if block in self.index or not self.index.add_block(block, block_hash, tokens, parent, root):
            return False
        self._after_insert(block, parent, now)
        return True

    def finish_restore(self) -> None:
        """Rebuild the free list from the index."""
        self.free_list.rebuild(self.index)

    def remove_subtree(self, block: int) -> None:
        """Remove a block and all that follow it, unless one of them is pinned."""
        subtree = self.index.list_subtree(block) if block in self.index else []
        if not any(self.pin_counts[member] for member in subtree):
            for member in subtree:
                self.remove_leaf(member)

    def remove_leaf(self, block: int) -> None:
        """Remove a leaf that is not pinned, and free it."""
        require_invariant(not self.pin_counts[block], f"block {block} is removed and is pinned")
        self._evictor.remove_candidate(block)
        self._remove_block(block)

    def check(self) -> None:
        """Raise PoolLedgerError unless all tables are consistent. Slow, for tests: O(blocks)."""
        self.index.check()
        self.free_list.check(self.index)
        pinned = [block for block in range(self.num_blocks) if self.pin_counts[block]]
        require_invariant(
            all(block in self.index for block in pinned), "a pinned block is not in the index"
        )
        require_invariant(min(self.pin_counts, default=0) >= 0, "pins below 0")

    def _after_insert(self, block: int, parent: int, now: float) -> None:
        if parent != ROOT:
            self._evictor.remove_candidate(parent)
            self._evictor.on_child_added(parent)
        self._evictor.on_block_inserted(
            block, index_key_of(self.index.block_hash(block)), self.index.paths.depth(block), now
        )
        self._update_candidate(block)
        self.used_flags[block] = 0
        for on_insert in self._insert_listeners:
            on_insert(block)

    def _evict_block(self, now: float) -> bool:
        block = self._evictor.choose_victim(now)
        if block is None:
            return False
        self.num_evictions += 1
        self._remove_block(block)
        return True

    def _remove_block(self, block: int) -> None:
        for on_remove in self._removal_listeners:
            on_remove(block)
        parent, key = self.index.paths.parent(block), index_key_of(self.index.block_hash(block))
        self.index.remove_leaf(block)
        self._evictor.on_block_removed(block, key)
        self.free_list.add_block(block)
        if parent != ROOT:
            self._update_candidate(parent)

    def _update_candidate(self, block: int) -> None:
        if not self.pin_counts[block] and self.index.is_leaf(block):
            self._evictor.add_candidate(block)
