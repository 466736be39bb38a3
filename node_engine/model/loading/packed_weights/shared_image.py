"""The segment of one weight image: all nodes of a host that use the image map the same file.

The name of the file is that of the image, so nodes find it without asking anybody. Two kernel locks
on it say what state it is in:

- A shared `flock`, held by each process that uses the image. `remove_stale_segments` removes a
  segment whose `flock` is free, so the file goes after its last user, also a killed one.
- Byte 0, held by the process that fills it. Others wait for the byte. If its holder dies, the
  kernel gives it to one of them.

The file has an image if it begins with a header, whose magic is written last. A file that is not
empty, has no header and whose byte 0 is free was left by a process that died. It is removed, never
continued.
"""

import atexit
import fcntl
import os
import stat
from pathlib import Path

from baton.errors import ConfigError
from baton.process import log
from baton.shared_memory.byte_locks import ByteLockWait, try_lock_byte
from baton.shared_memory.segment import SEGMENT_PREFIX, reserve_segment_size
from baton.shared_memory.shared_file import release_shared_file
from node_engine.model.loading.packed_weights.image_layout import ImageLayout, split_magic
from node_engine.model.loading.packed_weights.image_memory import (
    ImageMemory,
    allocate_file_image,
    map_image_for_reading,
)

_FILLER_BYTE = 0
_KNOB = "the size of the model"  # what determines the size of the segment, for messages
_MAX_ATTEMPTS = 100  # to open a file that other processes remove meanwhile


class SharedImageUnavailable(Exception):
    """The image cannot be shared with other processes here. The message says why."""


class SharedImage:
    """The open segment of an image. This process keeps it alive until `release`."""

    def __init__(self, folder: Path, layout: ImageLayout) -> None:
        """Open the segment, or create an empty one. Raises SharedImageUnavailable."""
        self.layout = layout
        self._folder = folder
        self.path = folder / f"{SEGMENT_PREFIX}weights-{layout.image_id}"
        self.is_mapped = False  # `release` is then called when nothing uses the memory
        self._filler_fd: int | None = None
        self._opener_pid = os.getpid()
        for _ in range(_MAX_ATTEMPTS):
            self._fd = self._open()
            fcntl.flock(self._fd, fcntl.LOCK_SH)
            if self.is_linked():
                return
            os.close(self._fd)  # it was removed before it was locked
        raise SharedImageUnavailable(f"{self.path} is removed again and again")

    def _open(self) -> int:
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise SharedImageUnavailable(f"{self.path}: {error.strerror}") from error
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            os.close(fd)
            raise SharedImageUnavailable(
                f"{self.path} belongs to user {found.st_uid} with mode {found.st_mode & 0o777:o}, "
                "and a file that only this user can access was expected"
            )
        return fd

    def is_linked(self) -> bool:
        """Whether other processes still find this file by its name."""
        try:
            return os.path.samestat(os.fstat(self._fd), self.path.stat(follow_symlinks=False))
        except FileNotFoundError:
            return False

    def lock_for_filling(self, patience_seconds: float) -> None:
        """Wait until no other process fills the segment, and keep others from filling it.

        Raises SharedImageUnavailable if that takes longer than `patience_seconds`.
        """
        # A description of its own, which can be closed whatever happens to the lock.
        fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR)
        if try_lock_byte(fd, _FILLER_BYTE):
            self._filler_fd = fd
            return
        if not patience_seconds:
            os.close(fd)
            raise SharedImageUnavailable("another process is packing them")
        log.get_logger("engine").info("waiting for another process that packs the weights")
        self._filler_fd = ByteLockWait(fd, _FILLER_BYTE).finish(patience_seconds)
        if self._filler_fd is None:
            raise SharedImageUnavailable(
                f"another process has been packing them for {patience_seconds:g} s"
            )

    def unlock_for_others(self) -> None:
        if self._filler_fd is not None:
            os.close(self._filler_fd)
            self._filler_fd = None

    def is_empty(self) -> bool:
        return os.fstat(self._fd).st_size == 0

    def is_complete(self) -> bool:
        """Whether the segment has this image, all of it allocated. The filler's byte is locked."""
        found = os.fstat(self._fd)
        if found.st_size != self.layout.segment_bytes or found.st_blocks * 512 < found.st_size:
            return False
        try:
            self.layout.decode_header(os.pread(self._fd, self.layout.header_bytes, 0))
        except ValueError:
            return False
        return True

    def allocate(self) -> ImageMemory:
        """Allocate the memory of an empty segment. Raises SharedImageUnavailable."""
        try:
            reserve_segment_size(self._folder, self._fd, self.layout.segment_bytes, _KNOB)
            return allocate_file_image(self._folder, self._fd, self.layout, _KNOB)
        except ConfigError as error:
            raise SharedImageUnavailable(error.message) from error
        except OSError as error:
            raise SharedImageUnavailable(f"{self.path}: {error.strerror}") from error

    def mark_complete(self, header: bytes) -> None:
        """Write the header of the filled image: from now on other processes use it."""
        magic, rest = split_magic(header)
        os.pwrite(self._fd, rest, len(magic))
        os.pwrite(self._fd, magic, 0)

    def map_for_reading(self) -> ImageMemory:
        """Map the complete image. The segment is released once nothing uses the memory."""
        try:
            memory = map_image_for_reading(self._fd, self.layout, self.release)
        except OSError as error:
            raise SharedImageUnavailable(f"{self.path}: {error.strerror}") from error
        self.is_mapped = True
        atexit.register(self.release)  # the memory itself stays mapped until the process is gone
        return memory

    def remove(self) -> None:
        """Remove the file, so that others create another one. The filler's byte is locked."""
        if self.is_linked():
            self.path.unlink(missing_ok=True)

    def release(self) -> None:
        """Stop to keep the segment alive, and remove it if no other process does. Idempotent.

        In a forked process the segment stays, because the parent uses it.
        """
        self.unlock_for_others()
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        release_shared_file(self.path, fd, self._opener_pid)
        atexit.unregister(self.release)
