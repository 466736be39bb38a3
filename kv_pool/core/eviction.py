"""Which leaf goes when there is no room. The tier says what is in the index, what was used and which blocks may go
(*offered*: leaves that nobody pins); an evictor chooses among those."""

from array import array
from heapq import heapify, heappop, heappush
from typing import Protocol

import numpy as np

_NOWHERE = -1
_SPARE = 256  # entries of blocks that are not offered, beside as many as are


class Evictor(Protocol):
    """`now` is in seconds and never runs backwards."""

    def inserted(self, block: int, key: int, depth: int, now: float) -> None:
        """`block` is in the index, with `depth` blocks before it; `key` names its content."""

    def followed(self, block: int) -> None:
        """It has got a child."""

    def used(self, path: "array[int]", now: float) -> None:
        """Somebody looked up and found exactly these blocks."""

    def offer(self, block: int) -> None: ...

    def withdraw(self, block: int) -> None:
        """It may not go any more: it is pinned, or has got a child."""

    def choose(self, now: float) -> int | None:
        """The offered block that goes; it is withdrawn. None if none is offered."""

    def removed(self, block: int, key: int) -> None:
        """`block` is not in the index any more."""


class Offers:
    """Offered blocks in queues by last use, oldest first. A block stands in one queue; that it was used, withdrawn or
    moved to another one since is seen when its turn comes, and costs nothing before. When most of what stands in the
    queues is not offered any more, they are made anew."""

    def __init__(self, num_blocks: int, num_queues: int) -> None:
        self._queues: list[list[tuple[float, int]]] = [[] for _ in range(num_queues)]
        self._offered = bytearray(num_blocks)
        self._stands_in = array("b", [_NOWHERE]) * num_blocks
        self._num_offered = self._num_standing = 0

    def add(self, block: int, queue: int, last_use: float) -> None:
        self._num_offered += not self._offered[block]
        self._offered[block] = 1
        if self._stands_in[block] != queue:
            self._stands_in[block] = queue
            heappush(self._queues[queue], (last_use, block))
            self._num_standing += 1
            if self._num_standing > 2 * self._num_offered + _SPARE:
                self._sort_out()

    def withdraw(self, block: int) -> None:
        self._num_offered -= self._offered[block]
        self._offered[block] = 0

    def oldest(self, queue: int, belongs: "array[int]", last_use: "array[float]") -> int:
        """The offered block of `queue` whose last use is longest ago, or -1; `belongs` and `last_use` are what holds
        now, by block."""
        waiting = self._queues[queue]
        while waiting:
            since, block = waiting[0]
            stands = self._stands_in[block] == queue
            if stands and self._offered[block] and belongs[block] == queue and last_use[block] == since:
                return block
            heappop(waiting)
            self._num_standing -= 1
            if stands:
                self._stands_in[block] = _NOWHERE
                if self._offered[block]:
                    self.add(block, belongs[block], last_use[block])
        return -1

    def _sort_out(self) -> None:
        for queue, waiting in enumerate(self._queues):
            kept: list[tuple[float, int]] = []
            for since, block in waiting:
                if self._stands_in[block] != queue:
                    continue
                if self._offered[block]:
                    kept.append((since, block))
                else:
                    self._stands_in[block] = _NOWHERE
            heapify(kept)
            waiting[:] = kept
        self._num_standing = sum(map(len, self._queues))


class Lru:
    """Least recently used first: of the offered blocks the one whose last use is longest ago."""

    def __init__(self, num_blocks: int) -> None:
        self._last_use = array("d", bytes(8 * num_blocks))
        self._last_uses = np.frombuffer(self._last_use)  # the same memory
        self._queue = array("b", [0]) * num_blocks
        self._offers = Offers(num_blocks, 1)

    def inserted(self, block: int, key: int, depth: int, now: float) -> None:
        self._last_use[block] = now

    def followed(self, block: int) -> None:
        """No matter."""

    def used(self, path: "array[int]", now: float) -> None:
        self._last_uses[np.frombuffer(path, dtype=np.int32)] = now

    def offer(self, block: int) -> None:
        self._offers.add(block, 0, self._last_use[block])

    def withdraw(self, block: int) -> None:
        self._offers.withdraw(block)

    def choose(self, now: float) -> int | None:
        block = self._offers.oldest(0, self._queue, self._last_use)
        if block < 0:
            return None
        self._offers.withdraw(block)
        return block

    def removed(self, block: int, key: int) -> None:
        """Nothing to remember."""
