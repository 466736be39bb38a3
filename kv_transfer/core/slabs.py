"""Sets of slabs. A slab is one layer's piece of one logical block of a hand-off; a hand-off is a grid of
them."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Layers [layer, layer + layers) of logical blocks [block, block + blocks)."""

    layer: int
    layers: int
    block: int
    blocks: int

    @property
    def slabs(self) -> int:
        return self.layers * self.blocks

    @property
    def last_layer(self) -> int:
        return self.layer + self.layers

    @property
    def last_block(self) -> int:
        return self.block + self.blocks


@dataclass(frozen=True, slots=True)
class Grid:
    """All slabs of a hand-off: `num_layers` layers of logical blocks [first, last). A set of them is an int,
    one bit per slab, so that machines are cheap to copy and to compare."""

    num_layers: int
    first: int
    last: int

    @property
    def blocks(self) -> int:
        return self.last - self.first

    @property
    def slabs(self) -> int:
        return self.num_layers * self.blocks

    @property
    def everything(self) -> int:
        return (1 << self.slabs) - 1

    def holds(self, area: Rectangle) -> bool:
        """Whether an area that came from outside is not empty and inside the grid."""
        return (
            area.layers > 0
            and area.blocks > 0
            and area.last_layer <= self.num_layers
            and self.first <= area.block
            and area.last_block <= self.last
        )

    def bits(self, area: Rectangle) -> int:
        row = (1 << area.blocks) - 1
        bits = 0
        for layer in range(area.layer, area.last_layer):
            bits |= row << (layer * self.blocks + area.block - self.first)
        return bits


def each_layer(area: Rectangle) -> Iterator[Rectangle]:
    for layer in range(area.layer, area.last_layer):
        yield Rectangle(layer, 1, area.block, area.blocks)


def manifest_digest(so_far: int, area: Rectangle, checksum: int) -> int:
    """Add one Write to a manifest: a sum of hashes, so that the order of arrival does not matter."""
    mixed = xxhash.xxh3_64_intdigest(struct.pack("<4IQ", area.layer, area.layers, area.block, area.blocks, checksum))
    return (so_far + mixed) % (1 << 64)
