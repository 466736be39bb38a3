"""A segment as rows of one block each; copying and hashing a row release the GIL."""

from collections.abc import Sequence

import numpy as np
import xxhash


class BlockRows:
    def __init__(self, memory: memoryview, block_bytes: int) -> None:
        """View `memory` as rows of `block_bytes`; a shorter rest at its end is ignored."""
        count = len(memory) // block_bytes
        self._rows = np.frombuffer(memory, dtype=np.uint8, count=count * block_bytes).reshape(
            count, block_bytes
        )

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, block: int) -> memoryview:
        """Return the memory of one block."""
        memory: memoryview = self._rows[block].data
        return memory

    def copy_block(self, block: int, source: "BlockRows", source_block: int) -> None:
        """Copy `source_block` of `source` to `block`."""
        np.copyto(self._rows[block], source._rows[source_block])

    def checksum(self, block: int) -> int:
        """Return the 64-bit XXH3 of a block."""
        return xxhash.xxh3_64_intdigest(self._rows[block].data)

    def count_intact(self, blocks: Sequence[int], checksums: Sequence[int]) -> int:
        """Return how many of the first blocks match their checksums, up to the first mismatch."""
        for number, (block, checksum) in enumerate(zip(blocks, checksums, strict=True)):
            if self.checksum(block) != checksum:
                return number
        return len(blocks)

    def flip_bit(self, block: int) -> None:
        """Corrupt a block, for the `corrupt` action of failpoints."""
        self._rows[block, 0] ^= 1
