"""A segment as rows, one for each block. Copying and hashing a row release Python's lock."""

from collections.abc import Sequence

import numpy as np
import xxhash


class BlockRows:
    def __init__(self, memory: memoryview, block_bytes: int) -> None:
        """A tail shorter than a block is left alone."""
        count = len(memory) // block_bytes
        self._rows = np.frombuffer(memory, dtype=np.uint8, count=count * block_bytes).reshape(
            count, block_bytes
        )

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, block: int) -> memoryview:
        """Its memory."""
        memory: memoryview = self._rows[block].data
        return memory

    def copy_block(self, block: int, source: "BlockRows", of: int) -> None:
        np.copyto(self._rows[block], source._rows[of])

    def checksum(self, block: int) -> int:
        """XXH3, 64 bits."""
        return xxhash.xxh3_64_intdigest(self._rows[block].data)

    def count_intact(self, blocks: Sequence[int], checksums: Sequence[int]) -> int:
        """How many leading blocks are what their checksums say."""
        for number, (block, checksum) in enumerate(zip(blocks, checksums, strict=True)):
            if self.checksum(block) != checksum:
                return number
        return len(blocks)

    def flip_bit(self, block: int) -> None:
        """Damage it: the `corrupt` failpoint."""
        self._rows[block, 0] ^= 1
