"""The disk space of an installation, and the memory of a cluster's processes."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class ClusterMemory(NamedTuple):
    """The memory of a cluster."""

    private_bytes: int  # allocated by the processes, without mapped files such as libraries
    segment_bytes: int  # shared memory of the caches and of the pool


def disk_bytes(folder: Path) -> int:
    """Return the disk space of all files in the folder; links are not followed."""
    return sum(
        os.lstat(os.path.join(parent, name)).st_blocks * 512
        for parent, _, names in os.walk(folder)
        for name in names
    )


def list_segment_files(folder: Path, prefix: str) -> frozenset[Path]:
    """Return the segments that are in this folder now, of any cluster."""
    return frozenset(folder.glob(f"{prefix}*"))


def measure_cluster_memory(
    pids: Iterable[int], segments: Iterable[Path], processes: Path = Path("/proc")
) -> ClusterMemory:
    """Return the memory of the processes and the segments.

    Raises OSError where the kernel does not show it. Only /proc/PID/status is read, because the
    maps and smaps of a process that leaves no core file are shown to root only.
    """
    private = sum(_anonymous_bytes((processes / str(pid) / "status").read_text()) for pid in pids)
    return ClusterMemory(private, sum(path.stat().st_blocks * 512 for path in segments))


def _anonymous_bytes(status: str) -> int:
    """Return the anonymous memory in the text of /proc/PID/status."""
    rows = (line.split() for line in status.splitlines())
    return next((int(row[1]) << 10 for row in rows if row[:1] == ["RssAnon:"]), 0)
