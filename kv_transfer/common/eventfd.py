"""An eventfd wakes a thread that waits in a poller."""

import os
import threading


class EventFd:
    """An eventfd that any thread may set at any time, even after `close`.

    One thread polls `fd` and clears it."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._is_open = True

    def set(self) -> None:
        with self._lock:
            if self._is_open:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        with self._lock:
            if self._is_open:
                self._is_open = False
                os.close(self.fd)
