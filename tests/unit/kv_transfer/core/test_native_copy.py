"""Slabs that the native library copies and hashes are those of numpy and xxhash."""

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kv.blocks import KVLayout
from kv_transfer.arena import arena_slabs, native_copy
from kv_transfer.arena.arena_slabs import ArenaSlabs

BLOCKS = 40


def make_layout(stripes: int) -> KVLayout:
    """Slabs of so many times 64 bytes, in two layers."""
    return KVLayout(
        num_layers=2, num_kv_heads=1, head_dim=8 * stripes, block_size=1, dtype="float32"
    )


def make_arena(layout: KVLayout, seed: int) -> ArenaSlabs:
    size = BLOCKS * layout.block_bytes
    arena = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return ArenaSlabs(arena.data, layout)


@settings(max_examples=60)
@given(
    stripes=st.sampled_from([1, 2, 3, 15, 16, 17, 128]),
    rows=st.lists(st.integers(0, 2 * BLOCKS - 1), min_size=1, max_size=40, unique=True),
    seed=st.integers(0, 99),
)
def test_copies_and_checksums_are_those_of_numpy(stripes: int, rows: list[int], seed: int) -> None:
    layout = make_layout(stripes)
    assert layout.slab_bytes == 64 * stripes
    source, target = make_arena(layout, seed), make_arena(layout, seed + 1)
    indices = np.array(rows, np.intp)
    expected = bytes(source.gather_slabs(indices))
    checksum = xxhash.xxh3_64_intdigest(expected)
    payload, found = source.gather_with_checksum(indices)
    assert (bytes(payload), found) == (expected, checksum)
    assert source.compute_checksum(indices) == checksum
    before = bytes(target.gather_slabs(np.arange(2 * BLOCKS)))
    reverse = np.ascontiguousarray(indices[::-1])
    assert source.copy_to(indices, target, reverse) == checksum
    assert bytes(target.gather_slabs(reverse)) == expected
    others = np.setdiff1d(np.arange(2 * BLOCKS), indices)
    kept = np.frombuffer(before, np.uint8).reshape(2 * BLOCKS, -1)[others]
    assert bytes(target.gather_slabs(others)) == kept.tobytes()


def test_without_the_library_numpy_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = make_layout(4)
    source, target = make_arena(layout, 1), make_arena(layout, 2)
    rows = np.array([5, 0, 7], np.intp)
    native = source.gather_with_checksum(rows)
    monkeypatch.setattr(arena_slabs, "find_native_copy", lambda slabs, size: None)
    payload, checksum = source.gather_with_checksum(rows)
    assert (bytes(payload), checksum) == (bytes(native[0]), native[1])
    assert source.compute_checksum(rows) == checksum
    assert source.copy_to(rows, target, rows) == checksum
    assert bytes(target.gather_slabs(rows)) == bytes(payload)


@pytest.mark.parametrize(
    ("slabs", "slab_bytes", "is_native"),
    [(4, 64, True), (3, 64, False), (1, 320, True), (100, 72, False), (1, 1 << 20, True)],
)
def test_what_the_library_does_not_hash_is_left_to_xxhash(
    slabs: int, slab_bytes: int, is_native: bool
) -> None:
    assert (native_copy.find_native_copy(slabs, slab_bytes) is not None) == is_native


def test_rows_without_a_place_are_refused() -> None:
    """The native library would read places behind the end of the list."""
    source, target = make_arena(make_layout(4), 1), make_arena(make_layout(4), 2)
    with pytest.raises(ValueError, match="3 slabs for 2 rows"):
        source.copy_to(np.array([5, 0, 7], np.intp), target, np.array([1, 2], np.intp))
