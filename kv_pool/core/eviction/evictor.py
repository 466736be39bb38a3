"""Evictors: choose the block to evict when a cache tier is full.

The tier reports what is in the index, which blocks were used, and which may be evicted: the
*candidates*, leaves without a pin. The evictor chooses a victim among the candidates.
"""

from array import array
from heapq import heapify, heappop, heappush
from typing import Protocol

import numpy as np

_NOT_QUEUED = -1
_STALE_ALLOWANCE = 256  # stale queue entries allowed on top of one for each candidate


class Evictor(Protocol):
    """What a cache tier reports to its eviction policy. `now` is in seconds and never decreases."""

    def on_block_inserted(self, block: int, key: int, depth: int, now: float) -> None:
        """`block` was indexed, with `depth` blocks before it; `key` identifies its content."""

    def on_child_added(self, block: int) -> None:
        """A child of `block` was indexed."""

    def on_path_used(self, path: "array[int]", now: float) -> None:
        """A look-up has found exactly these blocks."""

    def add_candidate(self, block: int) -> None: ...

    def remove_candidate(self, block: int) -> None:
        """`block` must not be evicted any more: it is pinned, or has a child now."""

    def choose_victim(self, now: float) -> int | None:
        """Choose a candidate to evict and remove it from the candidates; None if there is none."""

    def on_block_removed(self, block: int, key: int) -> None:
        """`block` was removed from the index."""


class CandidateQueues:
    """Candidates in priority queues, ordered by last use, oldest first.

    A block has an entry in one queue. If the block is used, removed or moved to another queue, its
    entry becomes stale and is corrected only when it reaches the front. When most entries are of
    blocks that are no candidates any more, the queues are rebuilt.
    """

    def __init__(self, num_blocks: int, num_queues: int) -> None:
        self._queues: list[list[tuple[float, int]]] = [[] for _ in range(num_queues)]
        self._is_candidate = bytearray(num_blocks)
        self._queue_of = array("b", [_NOT_QUEUED]) * num_blocks
        self._num_candidates = self._num_queued = 0

    def add_block(self, block: int, queue: int, last_use: float) -> None:
        self._num_candidates += not self._is_candidate[block]
        self._is_candidate[block] = 1
        if self._queue_of[block] != queue:
            self._queue_of[block] = queue
            heappush(self._queues[queue], (last_use, block))
            self._num_queued += 1
            if self._num_queued > 2 * self._num_candidates + _STALE_ALLOWANCE:
                self._compact_queues()

    def remove_block(self, block: int) -> None:
        self._num_candidates -= self._is_candidate[block]
        self._is_candidate[block] = 0

    def find_oldest(self, queue: int, current_queue: "array[int]", last_use: "array[float]") -> int:
        """Return the least recently used candidate of `queue`, or -1 if there is none.

        `current_queue` and `last_use` have the present values by block.
        """
        entries = self._queues[queue]
        while entries:
            queued_use, block = entries[0]
            is_queued = self._queue_of[block] == queue
            if (
                is_queued
                and self._is_candidate[block]
                and current_queue[block] == queue
                and last_use[block] == queued_use
            ):
                return block
            heappop(entries)
            self._num_queued -= 1
            if is_queued:
                self._queue_of[block] = _NOT_QUEUED
                if self._is_candidate[block]:
                    self.add_block(block, current_queue[block], last_use[block])
        return -1

    def _compact_queues(self) -> None:
        for queue, entries in enumerate(self._queues):
            kept: list[tuple[float, int]] = []
            for queued_use, block in entries:
                if self._queue_of[block] != queue:
                    continue
                if self._is_candidate[block]:
                    kept.append((queued_use, block))
                else:
                    self._queue_of[block] = _NOT_QUEUED
            heapify(kept)
            entries[:] = kept
        self._num_queued = sum(map(len, self._queues))


class LruEvictor:
    """Evicts the least recently used candidate."""

    def __init__(self, num_blocks: int) -> None:
        self._last_use = array("d", bytes(8 * num_blocks))
        self._last_uses = np.frombuffer(self._last_use)  # the same memory
        self._queue = array("b", [0]) * num_blocks
        self._candidates = CandidateQueues(num_blocks, 1)

    def on_block_inserted(self, block: int, key: int, depth: int, now: float) -> None:
        self._last_use[block] = now

    def on_child_added(self, block: int) -> None:
        """LRU does not use this."""

    def on_path_used(self, path: "array[int]", now: float) -> None:
        self._last_uses[np.frombuffer(path, dtype=np.int32)] = now

    def add_candidate(self, block: int) -> None:
        self._candidates.add_block(block, 0, self._last_use[block])

    def remove_candidate(self, block: int) -> None:
        self._candidates.remove_block(block)

    def choose_victim(self, now: float) -> int | None:
        block = self._candidates.find_oldest(0, self._queue, self._last_use)
        if block < 0:
            return None
        self._candidates.remove_block(block)
        return block

    def on_block_removed(self, block: int, key: int) -> None:
        """LRU does not use this."""
