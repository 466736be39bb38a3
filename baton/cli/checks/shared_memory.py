"""Checks of the segment folder, which holds the KV caches and the fence files."""

import errno
import fcntl
import os
import struct
import tempfile
from pathlib import Path

from baton.cli.checks.finding import Finding, bad_finding, ok_finding, warning_finding
from baton.cli.supervisor.memory_plan import find_memory_shortage, plan_memory
from baton.config.settings import Config
from baton.errors import ConfigError
from baton.shared_memory import segment
from baton.shared_memory.available_memory import (
    AvailableMemory,
    format_size,
    measure_available_memory,
)
from baton.shared_memory.memory_map import HUGE_PAGE

_SMALL_CACHE_BYTES = 64 << 20  # below it the cache holds hardly one conversation
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid
_OTHER_FOLDER = "choose another folder with --segment-dir"


def check_segment_folder(config: Config) -> list[Finding]:
    """Run every check of the folder; only the first one if files cannot be created there."""
    path = Path(config.segment_dir)
    first = check_writable(path)
    if first.level == "bad":
        return [first]
    return [
        first,
        check_memory(config, measure_available_memory(path)),
        check_locks(path),
        check_huge_pages(path),
        check_stale_segments(path),
    ]


def check_writable(path: Path) -> Finding:
    """Check that a file can be created in `path` and its memory allocated in advance.

    Without the allocation, a store to a full /dev/shm would crash the process.
    """
    try:
        with tempfile.TemporaryFile(dir=path, prefix="baton-doctor-") as file:
            os.posix_fallocate(file.fileno(), 0, HUGE_PAGE)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "enlarge it (docker: --shm-size), or " + _OTHER_FOLDER if full else _OTHER_FOLDER
        return bad_finding("segment folder", f"{path}: {error.strerror}", fix)
    return ok_finding("segment folder", f"{path}: files can be made and allocated")


def check_memory(config: Config, available: AvailableMemory) -> Finding:
    """Check that the caches of the nodes and of the pool fit, as `baton up` requires."""
    try:
        plan = plan_memory(config, available)
    except ConfigError as error:
        return bad_finding("cache memory", error.message, "set --kv-memory and --pool-memory")
    shortage = find_memory_shortage(plan, available)
    if shortage is not None:
        return bad_finding("cache memory", *shortage)
    detail = f"{plan}, {format_size(available.free_bytes)} {available.limited_by}"
    if plan.node_bytes < _SMALL_CACHE_BYTES and not plan.sized_on_gpu:
        return warning_finding(
            "cache memory",
            detail,
            "a larger segment folder (docker: --shm-size) or an explicit --kv-memory",
        )
    return ok_finding("cache memory", detail)


def check_locks(path: Path) -> Finding:
    """Check that open-file-description locks work in `path`.

    Such a lock proves that a writer can write no more (fencing).
    """
    try:
        with (
            tempfile.NamedTemporaryFile(dir=path, prefix="baton-doctor-") as locked,
            open(locked.name, "r+b") as reopened,
        ):
            first, second = (_try_lock_file(file.fileno()) for file in (locked, reopened))
    except OSError as error:
        return bad_finding(
            "fences", f"no open-file-description locks in {path}: {error.strerror}", _OTHER_FOLDER
        )
    if not first or second:
        return bad_finding(
            "fences", f"open-file-description locks in {path} have no effect", _OTHER_FOLDER
        )
    return ok_finding("fences", "open-file-description locks hold")


def _try_lock_file(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
    except BlockingIOError:
        return False
    return True


def check_huge_pages(path: Path) -> Finding:
    try:
        created = segment.create_segment(path, "doctor", HUGE_PAGE)
    except ConfigError as error:
        return bad_finding("huge pages", error.message, _OTHER_FOLDER)
    huge = created.memory.has_huge_pages
    created.close()
    return huge_pages_finding(path, huge)


def huge_pages_finding(path: Path, has_huge_pages: bool) -> Finding:
    if has_huge_pages:
        return ok_finding("huge pages", f"{path}: segments get them")
    fix = (
        "Linux 6.1 or newer, a tmpfs folder, and free memory in one piece "
        "(echo 1 > /proc/sys/vm/compact_memory)"
    )
    return warning_finding(
        "huge pages", f"{path}: segments get none, and are read more slowly", fix
    )


def check_stale_segments(path: Path) -> Finding:
    """Report segments of killed processes. The next node that starts here removes them."""
    found = segment.list_stale_segments(path)
    if not found:
        return ok_finding("stale segments", "none")
    size = sum((path / name).stat().st_size for name in found)
    return warning_finding(
        "stale segments",
        f"{len(found)} in {path}, {format_size(size)}",
        "start a node there, which removes them",
    )
