"""What an installation takes of the disk, and what the processes of a cluster take of the
memory."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class ClusterMemory(NamedTuple):
    """Bytes. `private` is what processes hold by themselves, libraries they share counted once;
    `segments` is the shared memory of their caches and of the pool."""

    private: int
    segments: int


def installed_bytes(folder: Path) -> int:
    """Disk blocks of every file in the folder; links are not followed."""
    return sum(
        os.lstat(os.path.join(parent, name)).st_blocks * 512 for parent, _, names in os.walk(folder) for name in names
    )


def cluster_memory(pids: Iterable[int], segment_folder: Path, prefix: str) -> ClusterMemory:
    """Of processes that run. Segments are the files of this prefix that any of them has mapped."""
    private = 0
    segments: dict[str, int] = {}
    for pid in pids:
        process = Path("/proc", str(pid))
        rollup = _kibibytes((process / "smaps_rollup").read_text())
        private += (rollup["Pss_Anon"] + rollup["Pss_File"]) << 10
        for line in (process / "maps").read_text().splitlines():
            path = line.split(maxsplit=5)[5:]
            if path and path[0].startswith(str(segment_folder / prefix)) and os.path.exists(path[0]):
                segments[path[0]] = os.stat(path[0]).st_blocks * 512
    return ClusterMemory(private, sum(segments.values()))


def _kibibytes(text: str) -> dict[str, int]:
    """The lines of a smaps file that are amounts."""
    rows = (line.split() for line in text.splitlines() if line.endswith(" kB"))
    return {row[0].rstrip(":"): int(row[1]) for row in rows}
