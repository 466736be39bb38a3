"""Copies whole blocks of the shared pool into the arena, for engines that cannot read in place."""

import time
from collections.abc import Sequence

import numpy as np

from baton.types import BlockIndex

_TRIALS = 5


class BlockCopier:
    """Copies blocks by global index inside one address range."""

    def __init__(self, block_memory: memoryview, block_bytes: int) -> None:
        """`block_memory` begins with block 0; blocks that are not mapped are never touched."""
        self._blocks = np.frombuffer(block_memory, np.uint8).reshape(-1, block_bytes)

    def copy_blocks(self, pairs: Sequence[tuple[BlockIndex, BlockIndex]]) -> None:
        for source, destination in pairs:
            self._blocks[destination] = self._blocks[source]

    def measure_copy_seconds(self, source: BlockIndex, destination: BlockIndex) -> float:
        """Measure the seconds to copy one block: the median of a few trials."""
        durations = []
        for _ in range(_TRIALS):
            started = time.perf_counter()
            self.copy_blocks([(source, destination)])
            durations.append(time.perf_counter() - started)
        return sorted(durations)[_TRIALS // 2]
