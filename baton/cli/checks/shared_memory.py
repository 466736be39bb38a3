"""The segment folder: where caches lie and fences hold."""

import errno
import fcntl
import os
import struct
import tempfile
from pathlib import Path

from baton import segment
from baton.cli.checks.finding import Finding, bad, ok, warning
from baton.cli.memory_plan import plan_memory, too_much
from baton.config import Config
from baton.errors import ConfigError
from baton.memory_map import HUGE_PAGE
from baton.memory_room import MemoryRoom, memory_room, size_text

_LITTLE = 64 << 20  # bytes: a cache that holds hardly a conversation
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid
_OTHER_FOLDER = "choose another folder with --segment-dir"


def folder(config: Config) -> list[Finding]:
    """Every check of the folder, or why there is none to check."""
    path = Path(config.segment_dir)
    first = writable(path)
    if first.level == "bad":
        return [first]
    return [first, space(config, memory_room(path)), locks(path), huge_pages(path), leftovers(path)]


def writable(path: Path) -> Finding:
    """A file can be made there, and its memory allocated ahead: a store to a full /dev/shm is a crash otherwise."""
    try:
        with tempfile.TemporaryFile(dir=path, prefix="baton-doctor-") as file:
            os.posix_fallocate(file.fileno(), 0, HUGE_PAGE)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "enlarge it (docker: --shm-size), or " + _OTHER_FOLDER if full else _OTHER_FOLDER
        return bad("segment folder", f"{path}: {error.strerror}", fix)
    return ok("segment folder", f"{path}: files can be made and allocated")


def space(config: Config, room: MemoryRoom) -> Finding:
    """What the nodes and the pool of this machine would take, against what there is: what `up` refuses is bad."""
    try:
        plan = plan_memory(config, room)
    except ConfigError as error:
        return bad("cache memory", error.message, "set --kv-memory and --pool-memory")
    wrong = too_much(plan, room)
    if wrong is not None:
        return bad("cache memory", *wrong)
    told = f"{plan}, {size_text(room.left)} {room.bound}"
    if plan.each < _LITTLE:
        return warning("cache memory", told, "a larger segment folder (docker: --shm-size) or an explicit --kv-memory")
    return ok("cache memory", told)


def locks(path: Path) -> Finding:
    """Open-file-description locks exclude each other there: the proof that a writer can write no more."""
    try:
        with tempfile.NamedTemporaryFile(dir=path, prefix="baton-doctor-") as one, open(one.name, "r+b") as other:
            first, second = (_lock(file.fileno()) for file in (one, other))
    except OSError as error:
        return bad("fences", f"no open-file-description locks in {path}: {error.strerror}", _OTHER_FOLDER)
    if not first or second:
        return bad("fences", f"open-file-description locks in {path} exclude nobody", _OTHER_FOLDER)
    return ok("fences", "open-file-description locks hold")


def _lock(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
    except BlockingIOError:
        return False
    return True


def huge_pages(path: Path) -> Finding:
    try:
        made = segment.create(path, "doctor", HUGE_PAGE)
    except ConfigError as error:
        return bad("huge pages", error.message, _OTHER_FOLDER)
    huge = made.huge
    made.close()
    return huge_pages_finding(path, huge)


def huge_pages_finding(path: Path, there: bool) -> Finding:
    if there:
        return ok("huge pages", f"{path}: segments get them")
    fix = "Linux 6.1 or newer, a tmpfs folder, and free memory in one piece (echo 1 > /proc/sys/vm/compact_memory)"
    return warning("huge pages", f"{path}: segments get none, and are read more slowly", fix)


def leftovers(path: Path) -> Finding:
    """Segments of processes that were killed. The next node that starts there removes them."""
    found = segment.stale(path)
    if not found:
        return ok("stale segments", "none")
    size = sum((path / name).stat().st_size for name in found)
    return warning(
        "stale segments", f"{len(found)} in {path}, {size_text(size)}", "start a node there, which removes them"
    )
