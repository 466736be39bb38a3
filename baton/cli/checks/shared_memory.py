"""The segment folder: where caches lie and fences hold."""

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

_SMALL_CACHE_BYTES = 64 << 20  # bytes: a cache that holds hardly a conversation
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid
_OTHER_FOLDER = "choose another folder with --segment-dir"


def check_segment_folder(config: Config) -> list[Finding]:
    """Every check of the folder, or why there is none to check."""
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
    """A file can be made there, and its memory allocated ahead: a store to a full /dev/shm is a
    crash otherwise."""
    try:
        with tempfile.TemporaryFile(dir=path, prefix="baton-doctor-") as file:
            os.posix_fallocate(file.fileno(), 0, HUGE_PAGE)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "enlarge it (docker: --shm-size), or " + _OTHER_FOLDER if full else _OTHER_FOLDER
        return bad_finding("segment folder", f"{path}: {error.strerror}", fix)
    return ok_finding("segment folder", f"{path}: files can be made and allocated")


def check_memory(config: Config, room: AvailableMemory) -> Finding:
    """What the nodes and the pool of this machine would take, against what there is: what `up`
    refuses is bad."""
    try:
        plan = plan_memory(config, room)
    except ConfigError as error:
        return bad_finding("cache memory", error.message, "set --kv-memory and --pool-memory")
    wrong = find_memory_shortage(plan, room)
    if wrong is not None:
        return bad_finding("cache memory", *wrong)
    told = f"{plan}, {format_size(room.free_bytes)} {room.limited_by}"
    if plan.node_bytes < _SMALL_CACHE_BYTES:
        return warning_finding(
            "cache memory",
            told,
            "a larger segment folder (docker: --shm-size) or an explicit --kv-memory",
        )
    return ok_finding("cache memory", told)


def check_locks(path: Path) -> Finding:
    """Open-file-description locks exclude each other there: the proof that a writer can write no
    more."""
    try:
        with (
            tempfile.NamedTemporaryFile(dir=path, prefix="baton-doctor-") as one,
            open(one.name, "r+b") as other,
        ):
            first, second = (_try_lock_file(file.fileno()) for file in (one, other))
    except OSError as error:
        return bad_finding(
            "fences", f"no open-file-description locks in {path}: {error.strerror}", _OTHER_FOLDER
        )
    if not first or second:
        return bad_finding(
            "fences", f"open-file-description locks in {path} exclude nobody", _OTHER_FOLDER
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
        made = segment.create_segment(path, "doctor", HUGE_PAGE)
    except ConfigError as error:
        return bad_finding("huge pages", error.message, _OTHER_FOLDER)
    huge = made.has_huge_pages
    made.close()
    return huge_pages_finding(path, huge)


def huge_pages_finding(path: Path, there: bool) -> Finding:
    if there:
        return ok_finding("huge pages", f"{path}: segments get them")
    fix = "Linux 6.1 or newer, a tmpfs folder, and free memory in one piece (echo 1 > /proc/sys/vm/compact_memory)"
    return warning_finding(
        "huge pages", f"{path}: segments get none, and are read more slowly", fix
    )


def check_stale_segments(path: Path) -> Finding:
    """Segments of processes that were killed. The next node that starts there removes them."""
    found = segment.list_stale_segments(path)
    if not found:
        return ok_finding("stale segments", "none")
    size = sum((path / name).stat().st_size for name in found)
    return warning_finding(
        "stale segments",
        f"{len(found)} in {path}, {format_size(size)}",
        "start a node there, which removes them",
    )
