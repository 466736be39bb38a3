"""The data file of the pool's disk: a header, then slots of one block each.

The file has its full size from the beginning, is readable by its owner alone, and is locked for as
long as a pool uses it. It is read and written by system calls, not mapped: a mapped page that the
disk cannot deliver, or that was truncated, would kill the pool with SIGBUS, while a call fails.
"""

import fcntl
import json
import os
import secrets
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from baton.errors import ConfigError, ShuttingDown
from baton.kv.blocks import KVLayout

DISK_SIZE_FLAG = "--pool-disk"
DISK_FOLDER_FLAG = "--pool-disk-dir"
DISK_FILE_NAME = "pool-disk.kv"
HEADER_BYTES = 4096
_FORMAT = 1
_FALLOCATE_BYTES = 256 << 20  # per call, so that a stop is noticed in between
_MAGIC = b"BATONKV\0"
_HEAD = struct.Struct("<8sIQ")  # magic, length of what follows, XXH3 of it


@dataclass(frozen=True, slots=True)
class DiskFileHeader:
    """The model, layout and number of slots of a data file."""

    model_digest: str  # hex
    layout: KVLayout
    num_slots: int

    def encode_header(self, generation: int) -> bytes:
        body = json.dumps(self._fields() | {"generation": generation}).encode()
        return _HEAD.pack(_MAGIC, len(body), xxhash.xxh3_64_intdigest(body)) + body

    def decode_generation(self, header: bytes) -> int | None:
        """Return the generation in an encoded header; None if damaged or of other contents."""
        magic, length, check = _HEAD.unpack_from(header.ljust(_HEAD.size, b"\0"))
        body = header[_HEAD.size : _HEAD.size + length]
        if magic != _MAGIC or xxhash.xxh3_64_intdigest(body) != check:
            return None
        fields = json.loads(body)
        generation: int = fields.pop("generation")
        return generation if fields == self._fields() else None

    def _fields(self) -> dict[str, object]:
        layout = {
            name: getattr(self.layout, name) for name in sorted(KVLayout.__dataclass_fields__)
        }
        return {
            "format": _FORMAT,
            "model_digest": self.model_digest,
            "layout": layout,
            "slots": self.num_slots,
        }


class DiskFile:
    """An open and locked data file."""

    def __init__(self, fd: int, header: DiskFileHeader, generation: int, *, is_new: bool) -> None:
        self.num_slots = header.num_slots
        self.generation = generation  # a random number that identifies the file
        self.is_new = is_new  # just created, so that its slots hold nothing
        self._fd = fd
        self._block_bytes = header.layout.block_bytes

    def read_slot(self, slot: int, into: memoryview) -> bool:
        """Read a slot; returns False if the file has been truncated before it. Raises OSError."""
        return os.preadv(self._fd, [into], self._offset(slot)) == self._block_bytes

    def write_slot(self, slot: int, block: memoryview) -> None:
        """Write a slot. Raises OSError."""
        write_all(self._fd, block, self._offset(slot))

    def close(self) -> None:
        os.close(self._fd)

    def _offset(self, slot: int) -> int:
        return HEADER_BYTES + slot * self._block_bytes


def open_disk_file(
    folder: Path, size: int, digest: str, layout: KVLayout, should_continue: Callable[[], bool]
) -> DiskFile:
    """Open the data file of about `size` bytes in `folder`, which may take a while.

    The file is created anew unless there is an undamaged one of this model and layout. Raises
    ConfigError, which names the setting to change, and ShuttingDown once `should_continue` returns
    False.
    """
    header = DiskFileHeader(digest, layout, (size - HEADER_BYTES) // layout.block_bytes)
    if header.num_slots < 1:
        min_bytes = HEADER_BYTES + layout.block_bytes
        raise ConfigError(
            f"pool_disk is {size} bytes: one block and the header take {min_bytes}: "
            f"enlarge {DISK_SIZE_FLAG}"
        )
    path = folder / DISK_FILE_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return _reopen_file(path, header) or _create_file(path, header, should_continue)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}: choose another folder with {DISK_FOLDER_FLAG}"
        ) from None


def write_all(fd: int, data: "bytes | memoryview", offset: int) -> None:
    """Write all of `data` at `offset`. Raises OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def open_private_file(path: Path, flags: int) -> int:
    """Open a regular file that belongs to this user and has no other hard link.

    Raises ConfigError if it is not such a file, and OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink > 1:
        os.close(fd)
        raise ConfigError(
            f"{path} is not a regular file of user {os.geteuid()} without other hard links: "
            f"choose another folder with {DISK_FOLDER_FLAG}"
        )
    return fd


def _reopen_file(path: Path, header: DiskFileHeader) -> DiskFile | None:
    """Open an existing file; one that is damaged or has other contents is removed (None)."""
    try:
        fd = open_private_file(path, 0)
    except FileNotFoundError:
        return None
    try:
        _lock_file(fd, path)
        found = os.fstat(fd)
        is_private = not found.st_mode & 0o077  # else any user may have written its contents
        is_complete = found.st_size == HEADER_BYTES + header.num_slots * header.layout.block_bytes
        generation = None
        if is_private and is_complete:
            generation = header.decode_generation(os.pread(fd, HEADER_BYTES, 0))
        if generation is not None:
            return DiskFile(fd, header, generation, is_new=False)
        path.unlink(missing_ok=True)
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _create_file(
    path: Path, header: DiskFileHeader, should_continue: Callable[[], bool]
) -> DiskFile:
    size = HEADER_BYTES + header.num_slots * header.layout.block_bytes
    fd = open_private_file(path, os.O_CREAT | os.O_EXCL)
    try:
        _lock_file(fd, path)
        _allocate_file(fd, path, size, should_continue)
        generation = secrets.randbits(64)
        write_all(fd, header.encode_header(generation), 0)
    except BaseException:
        path.unlink(missing_ok=True)
        os.close(fd)
        raise
    return DiskFile(fd, header, generation, is_new=True)


def _allocate_file(fd: int, path: Path, size: int, should_continue: Callable[[], bool]) -> None:
    try:
        for start in range(0, size, _FALLOCATE_BYTES):  # slow where a file system writes each byte
            if not should_continue():
                raise ShuttingDown("the pool is stopping")
            os.posix_fallocate(fd, start, min(_FALLOCATE_BYTES, size - start))
    except OSError as error:
        free = os.statvfs(path.parent)
        raise ConfigError(
            f"{path.parent} cannot hold {size} bytes ({error.strerror}, "
            f"{free.f_bavail * free.f_frsize} free): lower {DISK_SIZE_FLAG} or choose another "
            f"folder with {DISK_FOLDER_FLAG}"
        ) from None


def _lock_file(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{path} is in use by another pool: choose another folder with {DISK_FOLDER_FLAG}"
        ) from None
