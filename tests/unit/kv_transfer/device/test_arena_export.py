"""The file that says how to open a decode node's device memory."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import UnmappableSegment
from baton.kv.blocks import KVLayout
from baton.shared_memory.segment import Segment, create_segment, round_up_segment_bytes
from kv_transfer.device.arena_export import read_export, write_export
from kv_transfer.device.device_memory import ArenaExport

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
EXPORT = ArenaExport("cuda", "a" * 32, 7, 1 << 40, "ab" * 64, 512, 32, 3, LAYOUT.slab_bytes)


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Segment]:
    made = create_segment(tmp_path, "arena", round_up_segment_bytes(1, 4096))
    yield made
    made.close()


def test_an_export_survives_the_file(arena: Segment) -> None:
    path = write_export(arena.path, EXPORT)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_export(arena.path.parent, arena.name, LAYOUT) == EXPORT


@pytest.mark.parametrize(
    "layout", [replace(LAYOUT, dtype="bfloat16"), replace(LAYOUT, num_layers=2)], ids=str
)
def test_another_kv_dtype_or_geometry_is_refused(arena: Segment, layout: KVLayout) -> None:
    write_export(arena.path, EXPORT)
    with pytest.raises(UnmappableSegment, match="layers, slab bytes"):
        read_export(arena.path.parent, arena.name, layout)


@pytest.mark.parametrize("data", [b"", b"\x80\x04\x95", b'{"kind": 1}', b"[" * 4096])
def test_a_damaged_export_is_refused(arena: Segment, data: bytes) -> None:
    write_export(arena.path, EXPORT).write_bytes(data)
    with pytest.raises(UnmappableSegment):
        read_export(arena.path.parent, arena.name, LAYOUT)


def test_a_segment_without_device_memory_is_refused(arena: Segment) -> None:
    for name in (arena.name, "../" + arena.name, "baton-arena-" + "0" * 32):
        with pytest.raises(UnmappableSegment):
            read_export(arena.path.parent, name, LAYOUT)
