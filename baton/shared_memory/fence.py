"""Fences: proof that a one-sided writer can write no more.

Beside each arena's segment lies a fence file, and each ticket names one byte of it. A writer holds
an exclusive open-file-description lock on its byte while it writes, and the kernel drops the lock
when the writer dies, however it dies. The arena's owner takes that same byte, and keeps it for
ever, before it lets the ticket's blocks be used for anything else. So whoever holds the byte is
alone with the blocks: a writer that comes late fails to lock and gives up, and no message, time-out
or clock can stand in for the proof. docs/design/0001-fence-per-ticket.md has the reasoning.

OFD locks conflict between open file descriptions, not processes, so this holds between two planes
of one process too. They are dropped when the last copy of the description closes, so descriptors
must not be inherited: Python's are not.
"""

import fcntl
import os
import struct
from itertools import count
from pathlib import Path

from baton.errors import PeerUnreachable
from baton.shared_memory.segment import FENCE_SUFFIX, open_peer_segment

_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid


def _try_lock_byte(fd: int, kind: int, byte: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0))
    except BlockingIOError:
        return False
    return True


class ArenaFences:
    """The owner's end: makes the file, mints bytes, and takes them for good."""

    def __init__(self, segment_path: Path) -> None:
        self.path = segment_path.with_name(segment_path.name + FENCE_SUFFIX)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        self._bytes = count()

    def allocate_byte(self) -> int:
        """A byte that no ticket of this arena had before."""
        return next(self._bytes)

    def try_close_byte(self, byte: int) -> bool:
        """Take the byte and keep it. True proves that its writer writes no more and never will
        again; False means that a writer holds it now. Idempotent."""
        return _try_lock_byte(self._fd, fcntl.F_WRLCK, byte)

    def close(self) -> None:
        os.close(self._fd)
        self.path.unlink(missing_ok=True)


class WriterFences:
    """The writer's end of one arena's fence file."""

    def __init__(self, folder: Path, segment_name: str) -> None:
        """Raises PeerGone when the file is not there."""
        fd, _ = open_peer_segment(folder, segment_name)  # validates the name and the owner
        os.close(fd)
        try:
            self._fd = os.open(folder / (segment_name + FENCE_SUFFIX), os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise PeerUnreachable(f"fence of segment {segment_name}: {error.strerror}") from error

    def try_lock_byte(self, byte: int) -> bool:
        """Before a write. False: the owner has closed the ticket off, and nothing may be
        written."""
        return _try_lock_byte(self._fd, fcntl.F_WRLCK, byte)

    def unlock_byte(self, byte: int) -> None:
        """After a write."""
        _try_lock_byte(self._fd, fcntl.F_UNLCK, byte)

    def close(self) -> None:
        """Drops every byte that is still held."""
        os.close(self._fd)
