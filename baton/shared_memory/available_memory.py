"""Measures how much memory segments may use now.

That is the least of the free memory of the segment folder's file system, of the machine and of this
process's control groups, less a reserve for everything else. A process that uses more gets no
error: the kernel kills processes, also unrelated ones, until the rest fits.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigError

RESERVE_SHARE = 0.1  # of the free memory: for weights, buffers and other programs
MAX_RESERVE_BYTES = 1 << 30
_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
_V1_LIMITS = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2_LIMITS = ("memory.max", "memory.current", "inactive_file")


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """Memory for segments, by the tightest of several bounds."""

    free_bytes: int
    limited_by: str  # describes the tightest bound, for messages
    reserve_bytes: int  # of the free bytes, those that segments must leave free

    @property
    def usable_bytes(self) -> int:
        """Bytes that segments may use."""
        return max(0, self.free_bytes - self.reserve_bytes)


def measure_available_memory(
    folder: Path, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")
) -> AvailableMemory:
    """Measure the memory that is available for segments in `folder`.

    `proc` and `groups` are the folders in which the kernel reports processes and control groups.
    """
    stat = os.statvfs(folder)
    in_folder = (stat.f_bavail * stat.f_frsize, f"free in segment folder {folder}")
    if not _is_memory_filesystem(folder, proc):
        return AvailableMemory(*in_folder, reserve_bytes=0)
    return _find_tightest_bound([in_folder, *_list_process_bounds(proc, groups)])


def measure_private_memory(
    proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")
) -> AvailableMemory:
    """Measure the memory that this process may allocate for itself, outside of any folder."""
    return _find_tightest_bound(_list_process_bounds(proc, groups) or [(sys.maxsize, "known")])


def _find_tightest_bound(bounds: list[tuple[int, str]]) -> AvailableMemory:
    free, limited_by = min(bounds)
    return AvailableMemory(
        free, limited_by, reserve_bytes=min(MAX_RESERVE_BYTES, int(RESERVE_SHARE * free))
    )


def _list_process_bounds(proc: Path, groups: Path) -> list[tuple[int, str]]:
    """Return (free bytes, description) of the machine and of this process's control groups."""
    available = _meminfo_available(proc)
    bounds = [] if available is None else [(available, "of the machine's memory available")]
    return bounds + [
        (free, f"left in control group {group}") for group, free in _cgroup_free_bytes(proc, groups)
    ]


def insufficient_memory_error(
    folder: Path, requested_bytes: int, available: AvailableMemory, knob: str, promised: int = 0
) -> ConfigError:
    """Build the error for a segment of `requested_bytes` that does not fit.

    `promised` is how many bytes other segments have reserved and not yet allocated.
    """
    others = f", {format_size(promised)} promised to other segments" if promised else ""
    usable = max(0, available.usable_bytes - promised)
    return ConfigError(
        f"segment folder {folder} cannot hold {requested_bytes} bytes "
        f"({format_size(requested_bytes)}): "
        f"{format_size(available.free_bytes)} {available.limited_by}, "
        f"{format_size(available.reserve_bytes)} kept in reserve{others}: "
        f"lower {knob} to {format_size(usable)} or less, enlarge the folder (docker: --shm-size) "
        "or the memory limit, or choose another folder with --segment-dir"
    )


def format_size(size: int) -> str:
    return f"{size / (1 << 30):.1f}GiB" if size >= 1 << 30 else f"{size >> 20}MiB"


def _meminfo_available(proc: Path) -> int | None:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def _is_memory_filesystem(folder: Path, proc: Path) -> bool:
    """Whether files in the folder use memory. An unknown file system is assumed to."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in (proc / "self" / "mountinfo").read_text().splitlines():
        mount, _, system = line.partition(" - ")
        if mount.split()[2] == number:
            return system.split()[0] in _MEMORY_FILESYSTEMS
    return True


def _cgroup_free_bytes(proc: Path, groups: Path) -> Iterator[tuple[str, int]]:
    """Yield (path, free bytes) of each control group of this process that has a memory limit.

    Both versions of control groups are read.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:  # a kernel without control groups
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            hierarchies = [(groups, _V2_LIMITS), (groups / "unified", _V2_LIMITS)]
        elif "memory" in controllers.split(","):
            hierarchies = [(groups / "memory", _V1_LIMITS)]
        else:
            continue
        for root, files in hierarchies:
            parts = [part for part in path.split("/") if part not in ("", "..")]
            for depth in range(len(parts), -1, -1):  # a container may see its own group as the root
                folder = root.joinpath(*parts[:depth])
                free = _free_bytes_of_cgroup(folder, *files)
                if free is not None:
                    yield "/" + "/".join(parts[:depth]), free


def _free_bytes_of_cgroup(
    group: Path, limit_file: str, usage_file: str, cache_field: str
) -> int | None:
    """Return the free bytes of a control group: None without a limit, or if it cannot be read.

    Inactive page cache counts as free.
    """
    try:
        limit = (group / limit_file).read_text().strip()
        if limit == "max":
            return None
        used = int((group / usage_file).read_text())
        fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used + int(fields.get(cache_field, 0)))
