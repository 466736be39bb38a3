"""An arena as rows of bytes, one row per slab.

The memory order of KVLayout puts slab (block, layer) at row block * layers + layer, so that any set
of slabs is one gather or one scatter. The native library copies and hashes them in one pass
(native_copy.py). Without it, numpy's take and fancy assignment release Python's lock as well and
were the fastest of the single calls measured here (40 GB/s warm; torch.index_copy_ 9). On a device,
gather_slabs and scatter_slabs of kv_kernels take the place of the two methods.
"""

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from baton.kv.blocks import KVLayout
from kv_transfer.arena.native_copy import find_native_copy
from kv_transfer.core.slabs import SlabRange

RowIndices = NDArray[np.intp]  # [slabs]


class ArenaSlabs:
    """Reads and writes slabs of one arena."""

    def __init__(self, arena: memoryview, layout: KVLayout) -> None:
        """`arena` holds at least one block; a tail shorter than a block is not used."""
        self.block_bytes = layout.block_bytes
        self.num_blocks = len(arena) // layout.block_bytes
        self._block_bytes = layout.block_bytes
        self._num_layers = layout.num_layers
        self._slab_bytes = layout.slab_bytes
        self.usable_bytes = self.num_blocks * layout.block_bytes
        self._rows = np.frombuffer(arena, dtype=np.uint8, count=self.usable_bytes).reshape(
            -1, layout.slab_bytes
        )
        self._address = self._rows.ctypes.data

    def has_blocks_at(self, offsets: Sequence[int]) -> bool:
        """Whether every byte offset is that of a block of this arena."""
        return all(
            offset % self._block_bytes == 0 and 0 <= offset < self.usable_bytes
            for offset in offsets
        )

    def slab_rows(self, slab_range: SlabRange, blocks: Sequence[int]) -> RowIndices:
        """Rows of the layers of `slab_range` of the given blocks, layer-major.

        Raises IndexError for a block that the arena does not have."""
        index = np.asarray(blocks, dtype=np.intp)
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < self.num_blocks:
            raise IndexError(
                f"blocks {index.min()}..{index.max()} of an arena of {self.num_blocks}"
            )
        layers = np.arange(slab_range.first_layer, slab_range.end_layer, dtype=np.intp)
        return (index * self._num_layers + layers[:, None]).reshape(-1)

    def gather_slabs(self, rows: RowIndices) -> memoryview:
        """A contiguous copy of the slabs."""
        out = np.empty((len(rows), self._slab_bytes), dtype=np.uint8)
        # mode="raise" would copy twice; slab_rows has checked the rows.
        np.take(self._rows, rows, axis=0, out=out, mode="clip")
        return out.reshape(-1).data

    def gather_with_checksum(self, rows: RowIndices) -> tuple[memoryview, int]:
        """A contiguous copy of the slabs, and its XXH3."""
        copy = find_native_copy(len(rows), self._slab_bytes)
        if copy is None:
            payload = self.gather_slabs(rows)
            return payload, xxhash.xxh3_64_intdigest(payload)
        out = np.empty(len(rows) * self._slab_bytes, dtype=np.uint8)
        checksum = copy(
            self._address, rows.ctypes.data, out.ctypes.data, None, len(rows), self._slab_bytes
        )
        return out.data, checksum

    def compute_checksum(self, rows: RowIndices) -> int:
        """The XXH3 of the slabs, in the order of `rows`."""
        copy = find_native_copy(len(rows), self._slab_bytes)
        if copy is None:
            return xxhash.xxh3_64_intdigest(self.gather_slabs(rows))
        return copy(self._address, rows.ctypes.data, None, None, len(rows), self._slab_bytes)

    def copy_to(self, rows: RowIndices, target: "ArenaSlabs", target_rows: RowIndices) -> int:
        """Copy slabs to as many rows of another arena of equal slabs. Returns their XXH3.

        Raises ValueError for another number of rows."""
        if len(rows) != len(target_rows):
            raise ValueError(f"{len(rows)} slabs for {len(target_rows)} rows")
        copy = find_native_copy(len(rows), self._slab_bytes)
        if copy is None:
            payload, checksum = self.gather_with_checksum(rows)
            target.scatter_slabs(target_rows, payload)
            return checksum
        return copy(
            self._address,
            rows.ctypes.data,
            target._address,
            target_rows.ctypes.data,
            len(rows),
            self._slab_bytes,
        )

    def scatter_slabs(self, rows: RowIndices, data: memoryview) -> None:
        """Copy contiguous slabs to their rows. `data` is len(rows) slabs long."""
        self._rows[rows] = np.frombuffer(data, dtype=np.uint8).reshape(len(rows), self._slab_bytes)

    def flip_bit(self, rows: RowIndices) -> None:
        """Change one bit of the first slab, for the `corrupt` failpoint."""
        self._rows[rows[0], 0] ^= 1
