"""Runs work in its order on a thread, and reports how it ended."""

import queue
import threading
from collections.abc import Callable


class CompletionThread:
    """A thread that takes one piece of work after the other: a stream's other end.

    With CUDA each waits for an event; with host memory it is the copy itself.
    """

    def __init__(self, name: str) -> None:
        self._num_queued = self._num_done = 0  # each is written by one thread
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        """Queue work, which must not raise. From one thread, if `is_idle` is used."""
        self._num_queued += 1
        self._work.put(work)

    @property
    def is_idle(self) -> bool:
        """Whether all work that was queued is done. For the thread that queues it."""
        return self._num_queued == self._num_done

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Let the thread do what is queued and end; a device that hangs is not waited for."""
        self._work.put(None)
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while self._do_next():
            """The last work is not kept alive while the thread waits."""

    def _do_next(self) -> bool:
        work = self._work.get()
        if work is None:
            return False
        work()
        self._num_done += 1
        return True
