"""The free blocks of a tier."""

from heapq import heappop, heappush

from kv_pool.core.index.radix_index import RadixIndex
from kv_pool.core.ledger import require_invariant


class FreeList:
    """Free blocks of `num_blocks`. The lowest is taken first, which keeps runs together."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._heap: list[int] = []  # free blocks below `_first_unused`
        self._first_unused = 0  # this block and all above it have never been allocated

    def __len__(self) -> int:
        return len(self._heap) + self._num_blocks - self._first_unused

    def take_block(self) -> int:
        """Remove the lowest free block and return it. There must be one."""
        if self._heap:
            return heappop(self._heap)
        self._first_unused += 1
        return self._first_unused - 1

    def add_block(self, block: int) -> None:
        heappush(self._heap, block)

    def rebuild(self, index: RadixIndex) -> None:
        """Make every block free that is not in the index."""
        blocks = range(self._num_blocks)
        self._first_unused = 1 + max((block for block in blocks if block in index), default=-1)
        self._heap = [block for block in range(self._first_unused) if block not in index]

    def check(self, index: RadixIndex) -> None:
        """Raise PoolLedgerError if a block is free twice, or free and indexed. O(blocks)."""
        require_invariant(len(set(self._heap)) == len(self._heap), "a block is free twice")
        free = (*self._heap, *range(self._first_unused, self._num_blocks))
        require_invariant(not any(block in index for block in free), "a free block is in the index")
        require_invariant(
            max(self._heap, default=-1) < self._first_unused,
            "a block is in the free heap and was never allocated",
        )
