"""Whole blocks copied inside one address range: from the shared pool, where the engine cannot read,
into the arena."""

import time
from collections.abc import Sequence

import numpy as np

from baton.types import BlockIndex

_TRIALS = 5


class BlockCopier:
    def __init__(self, reach: memoryview, block_bytes: int) -> None:
        """`reach`: block 0 first; of blocks that are not mapped nothing is touched."""
        self._blocks = np.frombuffer(reach, np.uint8).reshape(-1, block_bytes)

    def copy_blocks(self, pairs: Sequence[tuple[BlockIndex, BlockIndex]]) -> None:
        for source, destination in pairs:
            self._blocks[destination] = self._blocks[source]

    def measure_copy_seconds(self, source: BlockIndex, destination: BlockIndex) -> float:
        """Seconds that copying one block takes: the median of a few."""
        taken = []
        for _ in range(_TRIALS):
            began = time.perf_counter()
            self.copy_blocks([(source, destination)])
            taken.append(time.perf_counter() - began)
        return sorted(taken)[_TRIALS // 2]
