"""Which leaf goes when there is no room. The tier says what is in the index, what was used and
which blocks may go (*offered*: leaves that nobody pins); an evictor chooses among those."""

from array import array
from heapq import heapify, heappop, heappush
from typing import Protocol

import numpy as np

_NOT_QUEUED = -1
_STALE_ALLOWANCE = 256  # entries of blocks that are not offered, beside as many as are


class Evictor(Protocol):
    """`now` is in seconds and never runs backwards."""

    def on_block_inserted(self, block: int, key: int, depth: int, now: float) -> None:
        """`block` is in the index, with `depth` blocks before it; `key` names its content."""

    def on_child_added(self, block: int) -> None:
        """It has got a child."""

    def on_path_used(self, path: "array[int]", now: float) -> None:
        """Somebody looked up and found exactly these blocks."""

    def add_candidate(self, block: int) -> None: ...

    def remove_candidate(self, block: int) -> None:
        """It may not go any more: it is pinned, or has got a child."""

    def choose_victim(self, now: float) -> int | None:
        """The offered block that goes; it is withdrawn. None if none is offered."""

    def on_block_removed(self, block: int, key: int) -> None:
        """`block` is not in the index any more."""


class CandidateQueues:
    """Offered blocks in queues by last use, oldest first. A block stands in one queue; that it was
    used, withdrawn or moved to another one since is seen when its turn comes, and costs nothing
    before. When most of what stands in the queues is not offered any more, they are made anew."""

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

    def find_oldest(self, queue: int, belongs: "array[int]", last_use: "array[float]") -> int:
        """The offered block of `queue` whose last use is longest ago, or -1; `belongs` and
        `last_use` are what holds now, by block."""
        waiting = self._queues[queue]
        while waiting:
            since, block = waiting[0]
            stands = self._queue_of[block] == queue
            if (
                stands
                and self._is_candidate[block]
                and belongs[block] == queue
                and last_use[block] == since
            ):
                return block
            heappop(waiting)
            self._num_queued -= 1
            if stands:
                self._queue_of[block] = _NOT_QUEUED
                if self._is_candidate[block]:
                    self.add_block(block, belongs[block], last_use[block])
        return -1

    def _compact_queues(self) -> None:
        for queue, waiting in enumerate(self._queues):
            kept: list[tuple[float, int]] = []
            for since, block in waiting:
                if self._queue_of[block] != queue:
                    continue
                if self._is_candidate[block]:
                    kept.append((since, block))
                else:
                    self._queue_of[block] = _NOT_QUEUED
            heapify(kept)
            waiting[:] = kept
        self._num_queued = sum(map(len, self._queues))


class LruEvictor:
    """Least recently used first: of the offered blocks the one whose last use is longest ago."""

    def __init__(self, num_blocks: int) -> None:
        self._last_use = array("d", bytes(8 * num_blocks))
        self._last_uses = np.frombuffer(self._last_use)  # the same memory
        self._queue = array("b", [0]) * num_blocks
        self._candidates = CandidateQueues(num_blocks, 1)

    def on_block_inserted(self, block: int, key: int, depth: int, now: float) -> None:
        self._last_use[block] = now

    def on_child_added(self, block: int) -> None:
        """No matter."""

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
        """Nothing to remember."""
