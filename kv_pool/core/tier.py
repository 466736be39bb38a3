"""A tier: blocks of one memory, an index over them, pins, and an evictor that makes room. The pool's memory is one, its
disk another, and so is what a trace is replayed through.

Blocks come from `take`, which evicts if it must; they are the caller's until they are inserted or given back. Whoever
holds a path that must not go pins its deepest block.
"""

from array import array
from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np

from baton.block_hash import BlockHash
from kv_pool.core.chain import Chain, key_of
from kv_pool.core.eviction import Evictor
from kv_pool.core.ledger import require
from kv_pool.core.radix_index import ROOT, RadixIndex

Follow = Callable[[int], None]


class Tier:
    """`num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int, evictor: Evictor) -> None:
        self.total = num_blocks
        self.index = RadixIndex(num_blocks, block_size)
        self.evictions = 0
        self._evictor = evictor
        self._gained: list[Follow] = []
        self._losing: list[Follow] = []
        self._pins = array("i", bytes(4 * num_blocks))
        self._used = bytearray(num_blocks)
        self._all_used = np.frombuffer(self._used, dtype=np.uint8)  # the same memory, for many blocks at once
        self._free: list[int] = []  # a heap of those below `_fresh`: lowest first keeps runs together
        self._fresh = 0  # the first that was never used

    def follow(self, gained: Follow | None = None, losing: Follow | None = None) -> None:
        """`gained` is told each block that has come into the index, `losing` each that is about to leave it, while it
        is still there."""
        self._gained += [gained] if gained else []
        self._losing += [losing] if losing else []

    @property
    def num_free(self) -> int:
        return len(self._free) + self.total - self._fresh

    # reading

    def match(self, chain: Chain, now: float, most: int | None = None) -> "array[int]":
        """The longest prefix that is here, as a use of its blocks."""
        path = self.index.match(chain, most)
        if path:
            self._evictor.used(path, now)
            self._all_used[np.frombuffer(path, dtype=np.int32)] = 1
        return path

    def was_used(self, block: int) -> bool:
        """Whether anybody has found it since it was inserted."""
        return bool(self._used[block])

    def pin(self, block: int) -> None:
        """Keep `block` and all before it, until `unpin`."""
        require(block in self.index, f"block {block} is pinned and is not in the index")
        self._pins[block] += 1
        self._evictor.withdraw(block)

    def unpin(self, block: int) -> None:
        require(self._pins[block] > 0, f"block {block} is not pinned")
        self._pins[block] -= 1
        self._offer(block)

    def pins(self, block: int) -> int:
        """On the block itself."""
        return self._pins[block]

    # writing

    def take(self, count: int, now: float) -> list[int]:
        """Up to `count` blocks; fewer when the rest is pinned."""
        taken: list[int] = []
        while len(taken) < count:
            if not self.num_free and not self._evict(now):
                break
            taken.append(heappop(self._free) if self._free else self._first_use())
        return taken

    def give_back(self, block: int) -> None:
        require(block not in self.index, f"block {block} is given back and is in the index")
        heappush(self._free, block)

    def insert(self, block: int, chain: Chain, number: int, parent: int, now: float) -> bool:
        """Make a taken block findable; see RadixIndex.insert."""
        if not self.index.insert(block, chain, number, parent):
            return False
        self._inserted(block, parent, now)
        return True

    def restore(self, block: int, name: bytes, tokens: bytes, parent: int, root: BlockHash, now: float) -> bool:
        """`insert` of a free block, for what was here in an earlier life. Afterwards, `restored`."""
        if block in self.index or not self.index.add(block, name, tokens, parent, root):
            return False
        self._inserted(block, parent, now)
        return True

    def restored(self) -> None:
        self._fresh = 1 + max((block for block in range(self.total) if block in self.index), default=-1)
        self._free = [block for block in range(self._fresh) if block not in self.index]

    def drop_branch(self, block: int) -> None:
        """`drop` a block with all that follow it, unless somebody pins one of them."""
        branch = self.index.branch(block) if block in self.index else []
        if not any(self._pins[one] for one in branch):
            for one in branch:
                self.drop(one)

    def drop(self, block: int) -> None:
        """Remove a leaf that nobody pins, and free it."""
        require(not self._pins[block], f"block {block} is dropped and is pinned")
        self._evictor.withdraw(block)
        self._remove(block)

    def check(self) -> None:
        """Raise LedgerError unless the books agree. Looks at everything: for tests."""
        self.index.check()
        require(len(set(self._free)) == len(self._free), "a block is free twice")
        free = (*self._free, *range(self._fresh, self.total))
        require(not any(block in self.index for block in free), "a free block is in the index")
        require(max(self._free, default=-1) < self._fresh, "a block is free and was never used")
        pinned = [block for block in range(self.total) if self._pins[block]]
        require(all(block in self.index for block in pinned), "a pinned block is not in the index")
        require(min(self._pins, default=0) >= 0, "pins below 0")

    def _inserted(self, block: int, parent: int, now: float) -> None:
        if parent != ROOT:
            self._evictor.withdraw(parent)
            self._evictor.followed(parent)
        self._evictor.inserted(block, key_of(self.index.name(block)), self.index.depth(block), now)
        self._offer(block)
        self._used[block] = 0
        for tell in self._gained:
            tell(block)

    def _first_use(self) -> int:
        self._fresh += 1
        return self._fresh - 1

    def _evict(self, now: float) -> bool:
        block = self._evictor.choose(now)
        if block is None:
            return False
        self.evictions += 1
        self._remove(block)
        return True

    def _remove(self, block: int) -> None:
        for tell in self._losing:
            tell(block)
        parent, key = self.index.parent(block), key_of(self.index.name(block))
        self.index.remove(block)
        self._evictor.removed(block, key)
        heappush(self._free, block)
        if parent != ROOT:
            self._offer(parent)

    def _offer(self, block: int) -> None:
        if not self._pins[block] and self.index.is_leaf(block):
            self._evictor.offer(block)
