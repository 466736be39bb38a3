"""Sets of slabs. A slab is one layer of one logical block; a hand-off is a grid of slabs."""

import struct
from dataclasses import dataclass

import xxhash


@dataclass(frozen=True, slots=True)
class SlabRange:
    """The slabs of consecutive layers of consecutive logical blocks."""

    first_layer: int
    num_layers: int
    first_block: int
    num_blocks: int

    @property
    def num_slabs(self) -> int:
        return self.num_layers * self.num_blocks

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.end_layer)

    @property
    def end_layer(self) -> int:
        return self.first_layer + self.num_layers

    @property
    def end_block(self) -> int:
        return self.first_block + self.num_blocks


@dataclass(frozen=True, slots=True)
class SlabGrid:
    """All slabs of a hand-off: `num_layers` layers of logical blocks [first_block, end_block).

    A set of them is an int, one bit per slab, so that machines are cheap to copy and to compare."""

    num_layers: int
    first_block: int
    end_block: int

    @property
    def num_blocks(self) -> int:
        return self.end_block - self.first_block

    @property
    def num_slabs(self) -> int:
        return self.num_layers * self.num_blocks

    @property
    def full_mask(self) -> int:
        """The set of all slabs."""
        return (1 << self.num_slabs) - 1

    def contains(self, slab_range: SlabRange) -> bool:
        """Whether a range that a peer sent is not empty and lies inside the grid."""
        return (
            slab_range.num_layers > 0
            and slab_range.num_blocks > 0
            and slab_range.end_layer <= self.num_layers
            and self.first_block <= slab_range.first_block
            and slab_range.end_block <= self.end_block
        )

    def bitmask(self, slab_range: SlabRange) -> int:
        """The slabs of a range that the grid contains, as a set."""
        row = (1 << slab_range.num_blocks) - 1
        bits = 0
        for layer in range(slab_range.first_layer, slab_range.end_layer):
            bits |= row << (layer * self.num_blocks + slab_range.first_block - self.first_block)
        return bits


def extend_manifest_digest(digest: int, slab_range: SlabRange, checksum: int) -> int:
    """Add one Write to a manifest's digest: a sum of hashes, so that the order does not matter."""
    mixed = xxhash.xxh3_64_intdigest(
        struct.pack(
            "<4IQ",
            slab_range.first_layer,
            slab_range.num_layers,
            slab_range.first_block,
            slab_range.num_blocks,
            checksum,
        )
    )
    return (digest + mixed) % (1 << 64)
