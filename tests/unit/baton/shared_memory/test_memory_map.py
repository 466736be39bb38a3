import os
from pathlib import Path

import pytest

from baton.shared_memory.memory_map import (
    HUGE_PAGE,
    map_file_for_reading,
    map_private_memory,
    measure_huge_page_share,
    release_addresses,
    reserve_addresses,
    view_memory,
)

SMAPS = """\
10000000-10200000 r--s 00000000 00:01 5 /dev/shm/before
ShmemPmdMapped:     2048 kB
10200000-10600000 r--s 00000000 00:01 6 /dev/shm/weights
Size:               4096 kB
Rss:                4096 kB
AnonHugePages:         0 kB
ShmemPmdMapped:     2048 kB
FilePmdMapped:         0 kB
VmFlags: rd sh mr
10600000-10a00000 rw-p 00000000 00:00 0
AnonHugePages:      4096 kB
"""


@pytest.mark.parametrize(
    ("start", "length", "share"),
    [
        (0x10200000, 0x400000, 0.5),
        (0x10600000, 0x400000, 1.0),
        (0x10200000, 0x800000, 0.75),
        (0x20000000, 0x400000, 0.0),
    ],
)
def test_huge_pages_of_a_range_are_counted(
    tmp_path: Path, start: int, length: int, share: float
) -> None:
    (tmp_path / "smaps").write_text(SMAPS)
    assert measure_huge_page_share(start, length, tmp_path / "smaps") == share


def test_without_smaps_there_is_no_huge_page() -> None:
    assert measure_huge_page_share(0x1000, 0x1000, Path("/nonexistent")) == 0.0


def test_private_memory_is_zeroed_and_writable() -> None:
    address, start, reserved = reserve_addresses(HUGE_PAGE, HUGE_PAGE)
    map_private_memory(address, HUGE_PAGE)
    view = view_memory(address, HUGE_PAGE, lambda: release_addresses(start, reserved))
    assert not any(view[::4096])
    view[-1] = 1
    assert 0.0 <= measure_huge_page_share(address, HUGE_PAGE) <= 1.0


def test_more_private_memory_than_there_is_raises_an_error() -> None:
    address, start, reserved = reserve_addresses(HUGE_PAGE, HUGE_PAGE)
    try:
        with pytest.raises(OSError, match="Cannot allocate memory"):
            map_private_memory(address, 1 << 50)
    finally:
        release_addresses(start, reserved)


def test_a_file_is_mapped_for_reading(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"weights".ljust(HUGE_PAGE, b"\0"))
    address, start, reserved = reserve_addresses(HUGE_PAGE, HUGE_PAGE)
    fd = os.open(path, os.O_RDWR)
    map_file_for_reading(address, HUGE_PAGE, fd)
    os.close(fd)
    view = view_memory(address, HUGE_PAGE, lambda: release_addresses(start, reserved))
    assert bytes(view[:7]) == b"weights"
    permissions = [
        line.split()[1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.startswith(f"{address:x}-")
    ]
    assert permissions == ["r--s"]
