"""Fences: proof that a one-sided writer cannot write any more.

Each arena's segment has a fence file, and each ticket names one byte of it. A writer holds an
exclusive open-file-description (OFD) lock on its byte while it writes, and the kernel releases the
lock when the writer dies, however it dies. The arena's owner locks the same byte, and keeps it
locked for ever, before the ticket's blocks are used for anything else. So only the holder of the
byte can access the blocks: a late writer cannot lock it and gives up. A message, a time-out or a
clock would not prove that. docs/design/0001-fence-per-ticket.md has the reasoning.

Such locks (byte_locks.py) also conflict between two transfer planes of one process.

A writer whose device writes for it is not fenced by its byte alone: when it is killed, the kernel
releases the lock before the device stops. So while device writes are in flight, the writer also
sets the byte's mark, which is the byte's value in the file. A byte that is locked and marked needs
another proof that the writer has ended (kv_transfer/device/writer_process.py).
"""

import os
from itertools import count
from pathlib import Path

from baton.errors import PeerUnreachable
from baton.shared_memory.byte_locks import try_lock_byte, unlock_byte
from baton.shared_memory.segment import FENCE_SUFFIX, open_peer_segment

_NO_MARK, _MARK = b"\0", b"\1"


def lock_for_device_writes(fd: int, byte: int) -> bool:
    """Lock a byte of a fence file and mark it. Returns whether it is locked."""
    if not try_lock_byte(fd, byte):
        return False
    os.pwrite(fd, _MARK, byte)
    return True


class ArenaFences:
    """The arena owner's end: creates the fence file, allocates bytes, and closes them for good."""

    def __init__(self, segment_path: Path) -> None:
        self.segment_path = segment_path
        self.path = segment_path.with_name(segment_path.name + FENCE_SUFFIX)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        self._bytes = count()

    def allocate_byte(self) -> int:
        """Return a byte that no ticket of this arena had before."""
        return next(self._bytes)

    def try_close_byte(self, byte: int) -> bool:
        """Lock the byte and keep it locked. Idempotent.

        True proves that its writer does not write now and cannot write later. False means that a
        writer holds the byte now.
        """
        return try_lock_byte(self._fd, byte)

    def is_marked(self, byte: int) -> bool:
        """Whether the writer of a byte that is closed has ended with device writes in flight."""
        return os.pread(self._fd, 1, byte) not in (b"", _NO_MARK)

    def close(self) -> None:
        os.close(self._fd)
        self.path.unlink(missing_ok=True)


class WriterFences:
    """The writer's end of one arena's fence file."""

    def __init__(self, folder: Path, segment_name: str) -> None:
        """Raises PeerUnreachable when the fence file does not exist."""
        fd, _ = open_peer_segment(folder, segment_name)  # validates the name and the owner
        os.close(fd)
        try:
            self._fd = os.open(folder / (segment_name + FENCE_SUFFIX), os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise PeerUnreachable(f"fence of segment {segment_name}: {error.strerror}") from error

    def try_lock_byte(self, byte: int) -> bool:
        """Lock the byte before a write. False if the owner has closed it: do not write then."""
        return try_lock_byte(self._fd, byte)

    def unlock_byte(self, byte: int) -> None:
        """Unlock the byte after a write."""
        unlock_byte(self._fd, byte)

    def try_lock_for_device(self, byte: int) -> bool:
        """Lock and mark the byte before writes of a device; see `unlock_from_device`."""
        return lock_for_device_writes(self._fd, byte)

    def unlock_from_device(self, byte: int) -> None:
        """Unlock the byte: every write of the device has ended."""
        os.pwrite(self._fd, _NO_MARK, byte)
        unlock_byte(self._fd, byte)

    def close(self) -> None:
        """Unlock every byte that is still locked."""
        os.close(self._fd)
