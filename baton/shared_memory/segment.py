"""Shared-memory segments: files that one process creates and locks, and that its peers map by name.

They lie in the segment folder, /dev/shm by default. The creator holds a `flock` on the file until
the process ends, however it ends. So a file whose lock is free belongs to no living process, and
`remove_stale_segments` removes it.

The size of a segment is reserved before its memory is allocated, by one process at a time, so that
two processes that start at once do not use the same free memory. segment_memory.py allocates it, in
pieces: all of it before the segment is used, or a first part, and the rest while the part is used.
The available memory is measured again before each piece.
"""

import errno
import fcntl
import hashlib
import math
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from baton.errors import ConfigError, PeerUnreachable, ShuttingDown
from baton.shared_memory.available_memory import insufficient_memory_error, measure_available_memory
from baton.shared_memory.memory_map import (
    HUGE_PAGE,
    map_file,
    release_addresses,
    reserve_addresses,
    view_memory,
)
from baton.shared_memory.segment_memory import SegmentMemory

SEGMENT_PREFIX = "baton-"
FENCE_SUFFIX = ".fence"
DEVICE_SUFFIX = ".device"  # of the file that says how to map a segment's device memory
LINK_SUFFIX = ".link"  # of the Unix socket on which a segment's owner receives messages
_COMPANION_SUFFIXES = (FENCE_SUFFIX, DEVICE_SUFFIX, LINK_SUFFIX)
DEFAULT_SEGMENT_FOLDER = Path("/dev/shm")
SEGMENT_NAME = re.compile(r"baton-[a-z]{1,16}-[0-9a-f]{32}")
WRITER_NAME = re.compile(r"baton-writer-[0-9a-f]{32}\.process")


def round_up_segment_bytes(num_bytes: int, block_bytes: int) -> int:
    """Round `num_bytes` up to a multiple of lcm(block_bytes, huge page).

    Segments that are mapped side by side then start at a whole block and at a huge page.
    """
    unit = math.lcm(block_bytes, HUGE_PAGE)
    return max(1, -(-num_bytes // unit)) * unit


def compute_host_id(folder: Path) -> str:
    """Return an id that is equal for processes that can map each other's segments.

    Such processes run on the same kernel and see the same segment folder. The id changes with a
    reboot and with another mount.
    """
    stat = folder.stat()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return hashlib.sha256(f"{boot}/{stat.st_dev}/{stat.st_ino}".encode()).hexdigest()[:32]


@dataclass(eq=False)
class Segment:
    """A segment that this process created and holds."""

    path: Path
    size_bytes: int
    memory: SegmentMemory  # how much of it is allocated, and may be used
    view: memoryview  # all of it, mapped as long as the view or anything made over it lives
    _fd: int
    _is_open: bool = field(default=True)

    @property
    def name(self) -> str:
        return self.path.name

    def close(self) -> None:
        """Remove the file and unlock it. The memory is unmapped once nothing uses it."""
        if not self._is_open:
            return
        self._is_open = False
        _unlink(self.path)
        os.close(self._fd)
        self.view = memoryview(b"")


def create_segment(
    folder: Path,
    kind: str,
    size: int,
    knob: str = "--kv-memory",
    is_wanted: Callable[[], bool] = lambda: True,
    *,
    initial_bytes: int | None = None,
) -> Segment:
    """Create a segment: zeroed, private to this user, locked and pre-faulted.

    `size` is in bytes, rounded by `round_up_segment_bytes`. Of these, `initial_bytes` are allocated
    and pre-faulted here (None: all, which takes seconds for a few GiB); the rest is reserved, and
    must not be used before `Segment.memory` has allocated it. Raises ConfigError when the folder or
    the memory cannot hold the whole segment, naming `knob`, the setting that determines its size,
    and ShuttingDown once `is_wanted()` is false.
    """
    path, fd = _create_locked(folder, kind, knob)
    address, start, reserved_size = reserve_addresses(size, HUGE_PAGE)
    try:
        reserve_segment_size(folder, fd, size, knob)
        map_file(address, size, fd)
        memory = SegmentMemory(folder, fd, address, size, knob)
        memory.allocate_until(size if initial_bytes is None else initial_bytes, is_wanted)
    except (OSError, ConfigError, ShuttingDown) as error:
        _unlink(path)
        os.close(fd)
        release_addresses(start, reserved_size)
        if isinstance(error, OSError):
            raise _creation_error(folder, size, error, knob) from error
        raise
    return Segment(
        path,
        size,
        memory,
        view_memory(address, size, lambda: release_addresses(start, reserved_size)),
        fd,
    )


def reserve_segment_size(folder: Path, fd: int, size: int, knob: str) -> None:
    """Set the size of a new segment if the memory that is free and not reserved suffices.

    Raises ConfigError.
    """
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        promised = unfilled_bytes(folder)
        room = measure_available_memory(folder)
        # A size that follows from an earlier measurement may take half of the reserve, as in
        # `SegmentMemory`.
        if size > room.free_bytes - room.reserve_bytes // 2 - promised:
            raise insufficient_memory_error(folder, size, room, knob, promised)
        os.ftruncate(fd, size)
    finally:
        os.close(lock)


def unfilled_bytes(folder: Path) -> int:
    """Return how many bytes the folder's segments have reserved and not yet allocated."""
    promised = 0
    for path in folder.glob(f"{SEGMENT_PREFIX}*"):
        if SEGMENT_NAME.fullmatch(path.name):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            promised += max(0, stat.st_size - stat.st_blocks * 512)
    return promised


def create_writer_file(folder: Path) -> tuple[Path, int]:
    """Create the file by which the end of this process can be proven, and lock it by `flock`.

    Returns (path, file descriptor). Raises ConfigError. `kv_transfer/device/writer_process.py` says
    what the file is for.
    """
    return _create_locked(folder, "writer", "--segment-dir", ".process")


def _create_locked(folder: Path, kind: str, knob: str, suffix: str = "") -> tuple[Path, int]:
    """Create an empty segment file and lock it. Returns (path, file descriptor).

    `remove_stale_segments` of another process may remove the file before it is locked. It is then
    created again.
    """
    if re.fullmatch("[a-z]{1,16}", kind) is None:
        raise ValueError(f"segment kind {kind!r} is not 1 to 16 lower-case letters")
    while True:
        path = folder / f"{SEGMENT_PREFIX}{kind}-{secrets.token_hex(16)}{suffix}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _creation_error(folder, 0, error, knob) from error
        if _try_lock(fd) and os.fstat(fd).st_nlink == 1:
            return path, fd
        os.close(fd)


def free_bytes(folder: Path) -> int:
    """Return the free space of the folder's file system, in bytes."""
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def _creation_error(folder: Path, size: int, error: OSError, knob: str) -> ConfigError:
    if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
        return insufficient_memory_error(folder, size, measure_available_memory(folder), knob)
    return ConfigError(
        f"segment of {size} bytes in {folder}: {error.strerror}: choose another with --segment-dir"
    )


def open_peer_segment(folder: Path, name: str, size: int | None = None) -> tuple[int, int]:
    """Open a peer's segment by the name that it sent. Returns (file descriptor, size in bytes).

    Raises PeerUnreachable when the name is not a segment name, or the file does not exist, belongs
    to another user, is a symbolic link, or does not have `size` bytes.
    """
    if SEGMENT_NAME.fullmatch(name) is None:
        raise PeerUnreachable(f"{name[:80]!r} is not a segment name")
    try:
        fd = os.open(folder / name, os.O_RDWR | os.O_NOFOLLOW)
    except OSError as error:
        raise PeerUnreachable(f"segment {name} in {folder}: {error.strerror}") from error
    stat = os.fstat(fd)
    if (
        stat.st_uid != os.geteuid()
        or (size is not None and stat.st_size != size)
        or stat.st_size % HUGE_PAGE
    ):
        os.close(fd)
        raise PeerUnreachable(
            f"segment {name} has {stat.st_size} bytes of user {stat.st_uid}, "
            f"{size} of ours were expected"
        )
    return fd, stat.st_size


def is_holder_alive(folder: Path, name: str) -> bool:
    """Whether the process that created the segment still lives, and so holds its lock."""
    try:
        fd, _ = open_peer_segment(folder, name)
    except PeerUnreachable:
        return False
    try:
        return not _try_lock(fd)
    finally:
        os.close(fd)


def remove_stale_segments(folder: Path) -> list[str]:
    """Remove segments whose creator has ended, and their companions. Returns the removed names."""
    removed = []
    for path in sorted(folder.glob(f"{SEGMENT_PREFIX}*")):
        segment, _ = _split_companion(path.name)
        if SEGMENT_NAME.fullmatch(segment) is None and WRITER_NAME.fullmatch(path.name) is None:
            continue
        if _remove_if_stale(path):
            removed.append(path.name)
    return removed


def list_stale_segments(folder: Path) -> list[str]:
    """Return the names of this user's segments whose creator has ended."""
    ours = [
        path.name
        for path in sorted(folder.glob(f"{SEGMENT_PREFIX}*"))
        if SEGMENT_NAME.fullmatch(path.name)
    ]
    return [
        name
        for name in ours
        if (folder / name).stat().st_uid == os.geteuid() and not is_holder_alive(folder, name)
    ]


def _remove_if_stale(path: Path) -> bool:
    """Remove one file if it is stale. Returns whether it was.

    A companion is stale when its segment is removed. Segments sort before their companions, so one
    pass removes all.
    """
    segment, is_companion = _split_companion(path.name)
    if is_companion:
        return not path.with_name(segment).exists() and _unlink(path)
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        # A file without a name was removed meanwhile, and the path may be that of a new one.
        return _try_lock(fd) and os.fstat(fd).st_nlink > 0 and _unlink(path)
    finally:
        os.close(fd)


def _split_companion(name: str) -> tuple[str, bool]:
    """The name of the segment that a file belongs to, and whether it is a companion of it."""
    for suffix in _COMPANION_SUFFIXES:
        if name.endswith(suffix):
            return name.removesuffix(suffix), True
    return name, False


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True
