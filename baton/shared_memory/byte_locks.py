"""Exclusive locks on single bytes of a file, which the kernel releases when their holder dies.

They are open-file-description (OFD) locks: they conflict between open file descriptions, not
between processes. The kernel releases a lock when the last copy of the description closes, so child
processes must not inherit descriptors. Python's are not inheritable.
"""

import fcntl
import os
import struct
import threading

_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid


def try_lock_byte(fd: int, byte: int) -> bool:
    """Lock a byte unless another description has locked it. Returns whether it is locked."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _pack_lock(fcntl.F_WRLCK, byte))
    except BlockingIOError:
        return False
    return True


def unlock_byte(fd: int, byte: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _pack_lock(fcntl.F_UNLCK, byte))


class ByteLockWait:
    """Waits for a byte that another process has locked, on a thread, without polling."""

    def __init__(self, fd: int, byte: int) -> None:
        """Begin to wait. `fd` belongs to this object from now on."""
        self._fd = fd
        self._byte = byte
        self._mutex = threading.Lock()
        self._ended = threading.Event()
        self._is_locked = False
        self._is_abandoned = False
        threading.Thread(target=self._wait, name="byte-lock", daemon=True).start()

    def finish(self, timeout_seconds: float) -> int | None:
        """Return the file descriptor once it has the lock, which belongs to the caller then.

        Returns None after the time-out, or if the file system fails; the descriptor is closed then.
        """
        self._ended.wait(timeout_seconds)
        with self._mutex:
            if self._is_locked:
                return self._fd
            if self._ended.is_set():
                os.close(self._fd)
            self._is_abandoned = True
            return None

    def _wait(self) -> None:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLKW, _pack_lock(fcntl.F_WRLCK, self._byte))
            locked = True
        except OSError:
            locked = False
        with self._mutex:
            self._is_locked = locked
            self._ended.set()
            if self._is_abandoned:
                os.close(self._fd)


def _pack_lock(kind: int, byte: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0)
