"""Sets of slabs, the manifest digest and the rows of an arena."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv.blocks import KVLayout
from kv_transfer.arena.arena_slabs import ArenaSlabs
from kv_transfer.core.slabs import SlabGrid, SlabRange, extend_manifest_digest

LAYOUT = KVLayout(num_layers=3, num_kv_heads=1, head_dim=4, block_size=2, dtype="bfloat16")

slab_ranges = st.builds(
    SlabRange, st.integers(0, 5), st.integers(0, 5), st.integers(0, 9), st.integers(0, 9)
)


def _members(slab_range: SlabRange) -> set[tuple[int, int]]:
    return {
        (layer, block)
        for layer in range(slab_range.first_layer, slab_range.end_layer)
        for block in range(slab_range.first_block, slab_range.end_block)
    }


@given(slab_ranges, slab_ranges)
def test_bitmasks_behave_as_sets_of_slabs(first: SlabRange, other: SlabRange) -> None:
    grid = SlabGrid(num_layers=4, first_block=2, end_block=8)
    inside = {(layer, block) for layer in range(4) for block in range(2, 8)}
    for slab_range in (first, other):
        assert grid.contains(slab_range) == (
            bool(_members(slab_range)) and _members(slab_range) <= inside
        )
    if grid.contains(first) and grid.contains(other):
        both = grid.bitmask(first) & grid.bitmask(other)
        assert both.bit_count() == len(_members(first) & _members(other))
        assert grid.bitmask(first).bit_count() == first.num_slabs
        assert grid.bitmask(first) | grid.full_mask == grid.full_mask
        layers = 0
        for layer in range(first.first_layer, first.end_layer):
            layers |= grid.bitmask(SlabRange(layer, 1, first.first_block, first.num_blocks))
        assert layers == grid.bitmask(first)


@given(st.permutations([(SlabRange(n, 1, 0, 2), n * 17) for n in range(5)]))
def test_a_manifest_does_not_depend_on_the_order_of_arrival(
    writes: list[tuple[SlabRange, int]],
) -> None:
    digest = 0
    for slab_range, checksum in writes:
        digest = extend_manifest_digest(digest, slab_range, checksum)
    in_order = 0
    for slab_range, checksum in sorted(writes, key=lambda write: write[1]):
        in_order = extend_manifest_digest(in_order, slab_range, checksum)
    assert digest == in_order
    assert digest != extend_manifest_digest(in_order, SlabRange(9, 1, 0, 2), 0)
    assert 0 <= digest < 2**64


@given(
    st.integers(0, 2),
    st.integers(1, 3),
    st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True),
)
def test_gather_and_scatter_follow_the_layout(layer: int, layers: int, blocks: list[int]) -> None:
    """Row arithmetic against KVLayout's own offsets."""
    layers = min(layers, LAYOUT.num_layers - layer)
    arena = np.random.default_rng(1).integers(0, 256, 5 * LAYOUT.block_bytes, dtype=np.uint8)
    slabs = ArenaSlabs(arena.data, LAYOUT)
    rows = slabs.slab_rows(SlabRange(layer, layers, 0, len(blocks)), blocks)
    expected = b"".join(
        arena[start : start + LAYOUT.slab_bytes].tobytes()
        for number in range(layer, layer + layers)
        for start in (LAYOUT.slab_offset(block * LAYOUT.block_bytes, number) for block in blocks)
    )
    assert bytes(slabs.gather_slabs(rows)) == expected
    other = np.zeros_like(arena)
    target = ArenaSlabs(other.data, LAYOUT)
    target.scatter_slabs(rows, memoryview(expected))
    assert bytes(target.gather_slabs(rows)) == expected
    assert np.count_nonzero(other) <= len(expected)
    target.flip_bit(rows)
    assert bytes(target.gather_slabs(rows)) != expected


def test_block_outside_the_arena_raises_index_error() -> None:
    slabs = ArenaSlabs(memoryview(bytearray(2 * LAYOUT.block_bytes + 5)), LAYOUT)
    assert slabs.num_blocks == 2
    for block in (-1, 2):
        with pytest.raises(IndexError):
            slabs.slab_rows(SlabRange(0, 1, 0, 1), [block])
