from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError, LayoutMismatch, PeerUnreachable
from baton.shared_memory.addressing import BlockAddressMap, BlockAddressSpace
from baton.shared_memory.memory_map import HUGE_PAGE
from baton.shared_memory.segment import Segment, create_segment
from baton.types import BlockIndex

BLOCK = 96


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=30), st.integers(1, 4))
def test_block_index_and_location_are_inverse(steps: list[tuple[int, bool]], unit: int) -> None:
    """Against a plain dictionary: segments come and go, indices stay unique and translate both
    ways."""
    addresses = BlockAddressMap(BLOCK, capacity_blocks=24 * unit, alignment_blocks=unit)
    live: dict[str, int] = {}
    for number, (units, removes) in enumerate(steps):
        if removes and live:
            gone = next(iter(live))
            span = addresses.remove_segment(gone)
            assert span.num_blocks == live.pop(gone)
            with pytest.raises(KeyError):
                addresses.get_span(gone)
        name, blocks = f"segment {number}", units * unit
        try:
            span = addresses.add_segment(name, blocks * BLOCK)
        except ConfigError:
            assert not _has_room(addresses, live, blocks, 24 * unit)
            continue
        assert span.start % unit == 0
        live[name] = blocks
    taken: set[int] = set()
    for name, blocks in live.items():
        for block in range(blocks):
            index = addresses.get_block_index(name, block * BLOCK)
            assert index not in taken
            assert 0 <= index < 24 * unit
            taken.add(index)
            assert addresses.locate_block(index) == (name, block * BLOCK)
    for hole in set(range(24 * unit)) - taken:
        with pytest.raises(LayoutMismatch):
            addresses.locate_block(BlockIndex(hole))


def _has_room(addresses: BlockAddressMap, live: dict[str, int], blocks: int, capacity: int) -> bool:
    taken = {
        index
        for name in live
        for index in range(addresses.get_span(name).start, addresses.get_span(name).end)
    }
    return any(
        taken.isdisjoint(range(start, start + blocks)) for start in range(capacity - blocks + 1)
    )


def test_invalid_offsets_and_sizes_are_rejected() -> None:
    addresses = BlockAddressMap(BLOCK, capacity_blocks=8, alignment_blocks=2)
    addresses.add_segment("a", 2 * BLOCK)
    for offset in (-BLOCK, 1, 2 * BLOCK):
        with pytest.raises(LayoutMismatch):
            addresses.get_block_index("a", offset)
    for size in (0, BLOCK, 2 * BLOCK + 1):
        with pytest.raises(LayoutMismatch):
            addresses.add_segment("b", size)
    with pytest.raises(ConfigError, match="does not fit in 8"):
        addresses.add_segment("b", 8 * BLOCK)
    with pytest.raises(ValueError, match="mapped already"):
        addresses.add_segment("a", 2 * BLOCK)


@pytest.fixture
def arenas(tmp_path: Path) -> Iterator[list[Segment]]:
    segments = [create_segment(tmp_path, "arena", size * HUGE_PAGE) for size in (1, 2, 1)]
    yield segments
    for segment in segments:
        segment.close()


def test_segments_lie_side_by_side_in_one_range(arenas: list[Segment], tmp_path: Path) -> None:
    block = HUGE_PAGE // 4
    space = BlockAddressSpace(block, tmp_path, range_bytes=64 * HUGE_PAGE)
    own, peer = space.attach_segment(arenas[0].name), space.attach_segment(arenas[1].name)
    assert space.address_map.get_span(arenas[1].name).start == 4
    own[0], peer[3 * block] = 1, 2
    assert arenas[0].view[0] == 1
    assert arenas[1].view[3 * block] == 2
    assert space.base_address % HUGE_PAGE == 0
    with pytest.raises(PeerUnreachable):
        space.attach_segment("baton-arena-" + "f" * 32)


def test_memory_stays_mapped_while_a_part_of_it_is_used(
    arenas: list[Segment], tmp_path: Path
) -> None:
    space = BlockAddressSpace(HUGE_PAGE, tmp_path, range_bytes=64 * HUGE_PAGE)
    own = space.attach_segment(arenas[0].name)
    part = np.frombuffer(own, dtype=np.uint8)[7:]
    del own
    part[0] = 3
    assert space.address_map.get_span(arenas[0].name).start == 0
    del part
    with pytest.raises(KeyError):
        space.address_map.get_span(arenas[0].name)
    third = space.attach_segment(arenas[2].name)
    assert space.address_map.get_span(arenas[2].name).start == 0
    third[5] = 9
    assert arenas[2].view[5] == 9
    assert arenas[0].view[7] == 3


def test_a_closed_segments_memory_outlives_it(tmp_path: Path) -> None:
    segment = create_segment(tmp_path, "arena", HUGE_PAGE)
    array = np.frombuffer(segment.view, dtype=np.uint8)
    segment.close()
    assert list(tmp_path.iterdir()) == []
    array[:] = 1
    assert array[-1] == 1


def test_segment_with_another_block_size_is_rejected(arenas: list[Segment], tmp_path: Path) -> None:
    space = BlockAddressSpace(3 * HUGE_PAGE, tmp_path, range_bytes=64 * HUGE_PAGE)
    with pytest.raises(LayoutMismatch):
        space.attach_segment(arenas[0].name)
