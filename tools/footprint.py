"""What an installation takes of the disk, and what the processes of a cluster take of the
memory."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class ClusterMemory(NamedTuple):
    """Bytes. `private_bytes` is what the processes have allocated themselves, without the files
    that they map, such as libraries; `segment_bytes` is the shared memory of their caches and of
    the pool."""

    private_bytes: int
    segment_bytes: int


def disk_bytes(folder: Path) -> int:
    """Disk blocks of every file in the folder; links are not followed."""
    return sum(
        os.lstat(os.path.join(parent, name)).st_blocks * 512
        for parent, _, names in os.walk(folder)
        for name in names
    )


def list_segment_files(folder: Path, prefix: str) -> frozenset[Path]:
    """The shared memory in this folder at this moment, of whatever cluster."""
    return frozenset(folder.glob(f"{prefix}*"))


def measure_cluster_memory(
    pids: Iterable[int], segments: Iterable[Path], processes: Path = Path("/proc")
) -> ClusterMemory:
    """The memory of running processes and of these segments. Raises OSError where the kernel does
    not show it.

    It reads /proc/PID/status alone: a process that leaves no core file shows its maps and smaps to
    nobody but root.
    """
    private = sum(_anonymous_bytes((processes / str(pid) / "status").read_text()) for pid in pids)
    return ClusterMemory(private, sum(path.stat().st_blocks * 512 for path in segments))


def _anonymous_bytes(status: str) -> int:
    """Of the text of /proc/PID/status."""
    rows = (line.split() for line in status.splitlines())
    return next((int(row[1]) << 10 for row in rows if row[:1] == ["RssAnon:"]), 0)
