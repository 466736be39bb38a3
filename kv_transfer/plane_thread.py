"""The thread that a plane runs on: waits for commands, messages and deadlines, and sleeps otherwise."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

from baton import log
from baton.clock import Clock
from kv_transfer.transport import Pollable
from kv_transfer.wake import Wake

_LONGEST_WAIT = 3600.0  # seconds; a deadline of infinity is no argument for poll


class Turner(Protocol):
    """What the thread drives. All methods run on it."""

    def turn(self) -> None:
        """Do everything that is due, without waiting."""
        ...

    def next_deadline(self) -> float:
        """When `turn` is due even if nothing arrives: on the plane's clock, in the past if there is more to
        do now."""
        ...

    def watched(self) -> Sequence[tuple[Pollable, bool]]:
        """What wakes the thread, and whether also when writable."""
        ...

    def wind_up(self) -> None:
        """The last thing that runs, also after a failure: end everything that is open."""
        ...


class PlaneThread:
    """Commands are closures that run on the thread in the order in which they were posted."""

    def __init__(self, name: str, turner: Turner, clock: Clock, on_failure: Callable[[], None]) -> None:
        """`on_failure` is called on the thread, last of all, when a defect of ours has ended it."""
        self._turner = turner
        self._on_failure = on_failure
        self._clock = clock
        self._wake = Wake()
        self._commands: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._ended = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, command: Callable[[], None]) -> bool:
        """From any thread; never blocks. False: the thread has ended, the command will not run."""
        with self._lock:
            if self._ended:
                return False
            self._commands.append(command)
        self._wake.set()
        return True

    def close(self) -> None:
        """Let commands posted so far run, wind up and wait for the end. Idempotent."""
        self._stopping = True
        self._wake.set()
        self._thread.join()
        self._wake.close()

    def _run(self) -> None:
        failed = False
        try:
            while not self._stopping:
                self._wait()
                self.run_posted()
                self._turner.turn()
        except Exception:
            failed = True
            log.get("transfer").exception("the transfer thread failed: open hand-offs end, new ones are refused")
        finally:
            with self._lock:
                self._ended = True
            self.run_posted()
            self._turner.wind_up()
            if failed:
                self._on_failure()

    def _wait(self) -> None:
        timeout = min(self._turner.next_deadline() - self._clock(), _LONGEST_WAIT)
        poller = zmq.Poller()
        poller.register(self._wake.fd, zmq.POLLIN)
        for pollable, also_writable in self._turner.watched():
            poller.register(pollable, zmq.POLLIN | (zmq.POLLOUT if also_writable else 0))
        poller.poll(max(0, int(timeout * 1000 + 0.999)))
        self._wake.clear()

    def run_posted(self) -> None:
        """On the thread itself: what was posted up to now, without waiting for the next turn."""
        while self._commands:
            self._commands.popleft()()
