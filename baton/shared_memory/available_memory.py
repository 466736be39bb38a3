"""How much memory segments may take here now: the least of what the segment folder's file system,
the machine and this process's control groups have left, without a reserve for everything else.

Whoever fills more than that is not told so: the kernel ends processes until the rest fits, a
neighbour's too.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigError

RESERVE_SHARE = 0.1  # of the memory that is left: for weights, buffers and other programs
MAX_RESERVE_BYTES = 1 << 30  # bytes
_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
_V1_LIMITS = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2_LIMITS = ("memory.max", "memory.current", "inactive_file")


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """`free_bytes` bytes, by the tightest bound, which `limited_by` describes; `reserve_bytes` of
    them stay free."""

    free_bytes: int
    limited_by: str
    reserve_bytes: int

    @property
    def usable_bytes(self) -> int:
        return max(0, self.free_bytes - self.reserve_bytes)


def measure_available_memory(
    folder: Path, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")
) -> AvailableMemory:
    """What is left for segments in `folder`. `proc` and `groups` are where the kernel tells of
    memory."""
    stat = os.statvfs(folder)
    bounds = [(stat.f_bavail * stat.f_frsize, f"free in segment folder {folder}")]
    if not _is_memory_filesystem(folder, proc):
        return AvailableMemory(*bounds[0], reserve_bytes=0)
    available = _meminfo_available(proc)
    if available is not None:
        bounds.append((available, "of the machine's memory available"))
    bounds += [
        (left, f"left in control group {group}") for group, left in _cgroup_free_bytes(proc, groups)
    ]
    left, bound = min(bounds)
    return AvailableMemory(
        left, bound, reserve_bytes=min(MAX_RESERVE_BYTES, int(RESERVE_SHARE * left))
    )


def insufficient_memory_error(
    folder: Path, wanted: int, room: AvailableMemory, knob: str, taken: int = 0
) -> ConfigError:
    """`taken`: what segments that others are filling in will still take."""
    others = f", {format_size(taken)} promised to other segments" if taken else ""
    most = max(0, room.usable_bytes - taken)
    return ConfigError(
        f"segment folder {folder} cannot hold {wanted} bytes ({format_size(wanted)}): {format_size(room.free_bytes)} "
        f"{room.limited_by}, {format_size(room.reserve_bytes)} kept in reserve{others}: lower {knob} to {format_size(most)} or less, "
        "enlarge the folder (docker: --shm-size) or the memory limit, or choose another folder with --segment-dir"
    )


def format_size(size: int) -> str:
    return f"{size / (1 << 30):.1f}GiB" if size >= 1 << 30 else f"{size >> 20}MiB"


def _meminfo_available(proc: Path) -> int | None:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def _is_memory_filesystem(folder: Path, proc: Path) -> bool:
    """Whether what lies there takes memory. What is not known does."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in (proc / "self" / "mountinfo").read_text().splitlines():
        mount, _, system = line.partition(" - ")
        if mount.split()[2] == number:
            return system.split()[0] in _MEMORY_FILESYSTEMS
    return True


def _cgroup_free_bytes(proc: Path, groups: Path) -> Iterator[tuple[str, int]]:
    """Bytes left in each control group, of either version, that this process is in and that has a
    limit."""
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
                left = _free_bytes_of_cgroup(folder, *files)
                if left is not None:
                    yield "/" + "/".join(parts[:depth]), left


def _free_bytes_of_cgroup(
    group: Path, limit_file: str, usage_file: str, cache_field: str
) -> int | None:
    """None if it has no limit or is not to be seen. Page cache that nobody uses can be had."""
    try:
        limit = (group / limit_file).read_text().strip()
        if limit == "max":
            return None
        used = int((group / usage_file).read_text())
        fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used + int(fields.get(cache_field, 0)))
