import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv_layout import KVLayout
from kv_transfer.core.slabs import Grid, Rectangle, each_layer, manifest_digest
from kv_transfer.slab_rows import SlabRows

LAYOUT = KVLayout(num_layers=3, num_kv_heads=1, head_dim=4, block_size=2, dtype="bfloat16")

areas = st.builds(Rectangle, st.integers(0, 5), st.integers(0, 5), st.integers(0, 9), st.integers(0, 9))


def _members(area: Rectangle) -> set[tuple[int, int]]:
    return {
        (layer, block) for layer in range(area.layer, area.last_layer) for block in range(area.block, area.last_block)
    }


@given(areas, areas)
def test_sets_of_slabs_are_sets(one: Rectangle, other: Rectangle) -> None:
    grid = Grid(num_layers=4, first=2, last=8)
    inside = {(layer, block) for layer in range(4) for block in range(2, 8)}
    for area in (one, other):
        assert grid.holds(area) == (bool(_members(area)) and _members(area) <= inside)
    if grid.holds(one) and grid.holds(other):
        both = grid.bits(one) & grid.bits(other)
        assert both.bit_count() == len(_members(one) & _members(other))
        assert grid.bits(one).bit_count() == one.slabs
        assert grid.bits(one) | grid.everything == grid.everything
        layers = 0
        for layer in each_layer(one):
            layers |= grid.bits(layer)
        assert layers == grid.bits(one)


@given(st.permutations([(Rectangle(n, 1, 0, 2), n * 17) for n in range(5)]))
def test_a_manifest_does_not_depend_on_the_order_of_arrival(writes: list[tuple[Rectangle, int]]) -> None:
    digest = 0
    for area, checksum in writes:
        digest = manifest_digest(digest, area, checksum)
    in_order = 0
    for area, checksum in sorted(writes, key=lambda write: write[1]):
        in_order = manifest_digest(in_order, area, checksum)
    assert digest == in_order
    assert digest != manifest_digest(in_order, Rectangle(9, 1, 0, 2), 0)
    assert 0 <= digest < 2**64


@given(st.integers(0, 2), st.integers(1, 3), st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True))
def test_gather_and_scatter_follow_the_layout(layer: int, layers: int, blocks: list[int]) -> None:
    """Row arithmetic against KVLayout's own offsets."""
    layers = min(layers, LAYOUT.num_layers - layer)
    arena = np.random.default_rng(1).integers(0, 256, 5 * LAYOUT.block_bytes, dtype=np.uint8)
    slabs = SlabRows(arena.data, LAYOUT)
    rows = slabs.rows(Rectangle(layer, layers, 0, len(blocks)), blocks)
    expected = b"".join(
        arena[start : start + LAYOUT.slab_bytes].tobytes()
        for number in range(layer, layer + layers)
        for start in (LAYOUT.slab_offset(block * LAYOUT.block_bytes, number) for block in blocks)
    )
    assert bytes(slabs.gather(rows)) == expected
    other = np.zeros_like(arena)
    target = SlabRows(other.data, LAYOUT)
    target.scatter(rows, memoryview(expected))
    assert bytes(target.gather(rows)) == expected
    assert np.count_nonzero(other) <= len(expected)
    target.flip_bit(rows)
    assert bytes(target.gather(rows)) != expected


def test_a_block_that_the_arena_lacks_is_an_index_error() -> None:
    slabs = SlabRows(memoryview(bytearray(2 * LAYOUT.block_bytes + 5)), LAYOUT)
    assert slabs.num_blocks == 2
    for block in (-1, 2):
        with pytest.raises(IndexError):
            slabs.rows(Rectangle(0, 1, 0, 1), [block])
