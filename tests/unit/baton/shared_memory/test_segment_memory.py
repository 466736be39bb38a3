"""Segments of which a part has memory, while the rest is still being allocated."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.shared_memory import segment_memory
from baton.shared_memory.addressing import BlockAddressSpace
from baton.shared_memory.available_memory import AvailableMemory
from baton.shared_memory.memory_map import HUGE_PAGE
from baton.shared_memory.segment import Segment, create_segment, unfilled_bytes

BLOCK = 1 << 16
SIZE = 24 * HUGE_PAGE  # three pieces
ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    """A segment of which the first piece is allocated."""
    segment = create_segment(tmp_path, "arena", SIZE, initial_bytes=1)
    yield segment
    segment.close()


def count_file_bytes(segment: Segment) -> int:
    """Return the allocated bytes of a file, rounded down to whole huge pages.

    A disk file system also counts blocks of its own metadata."""
    return segment.path.stat().st_blocks * 512 // HUGE_PAGE * HUGE_PAGE


def test_the_rest_is_reserved_and_allocated_later(segment: Segment, tmp_path: Path) -> None:
    first = segment.memory.allocated_bytes
    assert 0 < first < SIZE
    assert count_file_bytes(segment) == first
    assert SIZE - first - HUGE_PAGE < unfilled_bytes(tmp_path) <= SIZE - first, (
        "no other segment may use it"
    )
    segment.memory.allocate_until(first + 1)
    assert first < segment.memory.allocated_bytes < SIZE
    segment.memory.allocate_until(SIZE)
    assert segment.memory.allocated_bytes == count_file_bytes(segment) == SIZE
    assert unfilled_bytes(tmp_path) == 0


def test_a_peer_that_maps_the_segment_allocates_nothing(segment: Segment, tmp_path: Path) -> None:
    before = count_file_bytes(segment)
    mapped = BlockAddressSpace(BLOCK, tmp_path, 1 << 30).attach_segment(segment.name)
    assert len(mapped) == SIZE
    assert count_file_bytes(segment) == before
    segment.memory.allocate_until(SIZE)
    segment.view[SIZE - 1] = 7
    assert mapped[SIZE - 1] == 7, "the peer sees what is allocated afterwards"


def test_what_stands_in_the_first_part_stays_while_the_rest_is_allocated(segment: Segment) -> None:
    first = segment.memory.allocated_bytes
    segment.view[:first] = b"\xa5" * first
    threads = [
        threading.Thread(target=segment.memory.allocate_until, args=(SIZE,)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert segment.memory.allocated_bytes == SIZE
    assert bytes(segment.view[:first]) == b"\xa5" * first
    assert not any(segment.view[first:])


def test_the_rest_is_given_up(
    segment: Segment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs have used the memory meanwhile."""
    first = segment.memory.allocated_bytes
    monkeypatch.setattr(
        segment_memory, "measure_available_memory", lambda _: AvailableMemory(0, "left", 0)
    )
    with pytest.raises(ConfigError, match="0MiB left"):
        segment.memory.allocate_until(SIZE)
    unit = 3 * HUGE_PAGE
    segment.memory.give_up_rest(unit)
    kept = -(-first // unit) * unit
    assert segment.path.stat().st_size == kept, "a multiple of the unit, with all that has memory"
    assert unfilled_bytes(tmp_path) <= kept - first
    monkeypatch.undo()
    segment.memory.allocate_until(SIZE)
    assert segment.memory.allocated_bytes == first, "what was given up is not allocated any more"


FULL = """
import os, sys, threading
from pathlib import Path
from baton.shared_memory.segment import create_segment, round_up_segment_bytes
from node_engine.host.cache_memory import CacheMemory

folder, block = Path(sys.argv[1]), 1 << 16
segment = create_segment(folder, "arena", 64 << 20, initial_bytes=1)
memory = CacheMemory(segment, block)
first = memory.num_backed_blocks
with open(folder / "other", "wb") as other:  # another program fills the folder
    os.posix_fallocate(other.fileno(), 0, 40 << 20)
exhausted = threading.Event()
memory.start_allocation(exhausted.set)
assert exhausted.wait(60)
backed = memory.num_backed_blocks
segment.view[: backed * block] = b"\\x01" * (backed * block)
print("serves with", first <= backed < 1024, memory.back_blocks(1024) == backed)
"""


def test_a_tmpfs_that_becomes_full_makes_the_cache_smaller_and_no_sigbus(tmp_path: Path) -> None:
    """In a mount namespace of its own, with 80 MiB of tmpfs."""
    script = f'mount -t tmpfs -o size=80m none "$1" && "{sys.executable}" -c "$2" "$1"'
    found = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh", str(tmp_path), FULL],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    if "unshare" in found.stderr or "mount:" in found.stderr:
        pytest.skip(f"no mount namespace here: {found.stderr.strip()}")
    assert found.stdout.endswith("serves with True True\n"), (found.returncode, found.stderr)
    assert "cache is smaller than planned" in found.stdout


def test_a_piece_that_the_folder_refuses_leaves_the_rest_usable(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = segment.memory.allocated_bytes

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space"):
        segment.memory.allocate_until(SIZE)
    assert segment.memory.allocated_bytes == first
    segment.view[:first] = b"\x01" * first
