"""The file behind a pool's memory: a header, then slots of one block each. It has its full size
from the beginning, is this user's alone, and locked for as long as a pool uses it.

It is read and written by calls, not mapped: a mapped page that the disk cannot deliver, or that
somebody cut off, is a SIGBUS that takes the pool along; a call says so.
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
from baton.kv.kv_layout import KVLayout

DISK_SIZE_FLAG = "--pool-disk"
DISK_FOLDER_FLAG = "--pool-disk-dir"
DISK_FILE_NAME = "pool-disk.kv"
HEADER_BYTES = 4096
_FORMAT = 1
_FALLOCATE_BYTES = 256 << 20  # bytes at once
_MAGIC = b"BATONKV\0"
_HEAD = struct.Struct("<8sIQ")  # magic, length of what follows, XXH3 of it


@dataclass(frozen=True, slots=True)
class DiskFileHeader:
    """What the slots hold blocks of. `model_digest` in hex."""

    model_digest: str
    layout: KVLayout
    num_slots: int

    def encode_header(self, generation: int) -> bytes:
        said = json.dumps(self._fields() | {"generation": generation}).encode()
        return _HEAD.pack(_MAGIC, len(said), xxhash.xxh3_64_intdigest(said)) + said

    def decode_generation(self, header: bytes) -> int | None:
        """The number of the file that begins with `header`; None if it holds something else, or
        nothing sensible."""
        magic, length, check = _HEAD.unpack_from(header.ljust(_HEAD.size, b"\0"))
        said = header[_HEAD.size : _HEAD.size + length]
        if magic != _MAGIC or xxhash.xxh3_64_intdigest(said) != check:
            return None
        words = json.loads(said)
        generation: int = words.pop("generation")
        return generation if words == self._fields() else None

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
    """`generation`: a number that no other file has. `is_new`: it has just been made, and its slots
    hold nothing."""

    def __init__(self, fd: int, contents: DiskFileHeader, generation: int, *, fresh: bool) -> None:
        self.num_slots = contents.num_slots
        self.generation, self.is_new = generation, fresh
        self._fd = fd
        self._block_bytes = contents.layout.block_bytes

    def read_slot(self, slot: int, into: memoryview) -> bool:
        """False if the file does not go so far any more. Raises OSError."""
        return os.preadv(self._fd, [into], self._offset(slot)) == self._block_bytes

    def write_slot(self, slot: int, block: memoryview) -> None:
        """Raises OSError."""
        write_all(self._fd, block, self._offset(slot))

    def close(self) -> None:
        os.close(self._fd)

    def _offset(self, slot: int) -> int:
        return HEADER_BYTES + slot * self._block_bytes


def open_disk_file(
    folder: Path, size: int, digest: str, layout: KVLayout, wanted: Callable[[], bool]
) -> DiskFile:
    """The file of about `size` bytes in `folder`; made anew unless it is there, whole, and of this
    model and layout. It may take a while. Raises ConfigError, with the setting that mends it, and
    Draining once it is not `wanted` any more."""
    contents = DiskFileHeader(digest, layout, (size - HEADER_BYTES) // layout.block_bytes)
    if contents.num_slots < 1:
        least = HEADER_BYTES + layout.block_bytes
        raise ConfigError(
            f"pool_disk is {size} bytes: one block and the header take {least}: enlarge {DISK_SIZE_FLAG}"
        )
    path = folder / DISK_FILE_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return _reopen_file(path, contents) or _create_file(path, contents, wanted)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}: choose another folder with {DISK_FOLDER_FLAG}"
        ) from None


def write_all(fd: int, data: "bytes | memoryview", offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def open_private_file(path: Path, flags: int) -> int:
    """A file of this user's, and of nobody else's concern. Raises ConfigError for another user's,
    and OSError."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink > 1:
        os.close(fd)
        raise ConfigError(
            f"{path} is no file of user {os.geteuid()} under this name alone: choose another folder with {DISK_FOLDER_FLAG}"
        )
    return fd


def _reopen_file(path: Path, contents: DiskFileHeader) -> DiskFile | None:
    """None if there is none, or none that is of use: that one is removed."""
    try:
        fd = open_private_file(path, 0)
    except FileNotFoundError:
        return None
    try:
        _lock_file(fd, path)
        found = os.fstat(fd)
        private = not found.st_mode & 0o077  # else anybody may have written what it says
        whole = found.st_size == HEADER_BYTES + contents.num_slots * contents.layout.block_bytes
        generation = (
            contents.decode_generation(os.pread(fd, HEADER_BYTES, 0)) if private and whole else None
        )
        if generation is not None:
            return DiskFile(fd, contents, generation, fresh=False)
        path.unlink(missing_ok=True)
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _create_file(path: Path, contents: DiskFileHeader, wanted: Callable[[], bool]) -> DiskFile:
    size = HEADER_BYTES + contents.num_slots * contents.layout.block_bytes
    fd = open_private_file(path, os.O_CREAT | os.O_EXCL)
    try:
        _lock_file(fd, path)
        _allocate_file(fd, path, size, wanted)
        generation = secrets.randbits(64)
        write_all(fd, contents.encode_header(generation), 0)
    except BaseException:
        path.unlink(missing_ok=True)
        os.close(fd)
        raise
    return DiskFile(fd, contents, generation, fresh=True)


def _allocate_file(fd: int, path: Path, size: int, wanted: Callable[[], bool]) -> None:
    try:
        for start in range(0, size, _FALLOCATE_BYTES):  # some file systems write every byte
            if not wanted():
                raise ShuttingDown("the pool is stopping")
            os.posix_fallocate(fd, start, min(_FALLOCATE_BYTES, size - start))
    except OSError as error:
        free = os.statvfs(path.parent)
        raise ConfigError(
            f"{path.parent} cannot hold {size} bytes ({error.strerror}, {free.f_bavail * free.f_frsize} free): "
            f"lower {DISK_SIZE_FLAG} or choose another folder with {DISK_FOLDER_FLAG}"
        ) from None


def _lock_file(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{path} is another pool's: choose another folder with {DISK_FOLDER_FLAG}"
        ) from None
