"""The thread that a plane runs on: waits for commands, messages and deadlines, and sleeps otherwise."""

import os
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
        """When `turn` is due even if nothing arrives: on the plane's clock, in the past if there is more to do now."""
        ...

    def watched(self) -> Sequence[tuple[Pollable, bool]]:
        """What wakes the thread, and whether also when writable."""
        ...

    def say_goodbye(self) -> None:
        """End everything that is open."""
        ...

    def heard_out(self) -> bool:
        """Whether every peer has acknowledged what it was told by `say_goodbye`."""
        ...

    def shut(self) -> None:
        """Close links and files. The last thing that runs."""
        ...


def end_process() -> None:
    """A node whose transfer thread is gone would fail all that it is given: better gone itself, and started again."""
    log.flush()
    os._exit(1)


class PlaneThread:
    """Commands are closures that run on the thread in the order in which they were posted."""

    def __init__(
        self, name: str, turner: Turner, clock: Clock, close_timeout: float, on_defect: Callable[[], None]
    ) -> None:
        """`on_defect` is called when the turner raises: a defect of ours after which the thread is no more."""
        self._turner = turner
        self._clock = clock
        self._close_timeout = close_timeout
        self._on_defect = on_defect
        self._wake = Wake()
        self._commands: deque[Callable[[], None]] = deque()
        self._watched: Sequence[tuple[Pollable, bool]] | None = None
        self._poller = zmq.Poller()
        self._stopping = False
        self._ended = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
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
        """Let commands posted so far run, say goodbye and wait for the end. Idempotent."""
        self._stopping = True
        self._wake.set()
        self._thread.join()
        self._wake.close()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._once(self._turner.next_deadline())
            self.run_posted()
            self._say_goodbye()
            with self._lock:
                self._ended = True
            self.run_posted()  # posted since
            self._turner.say_goodbye()
            self._turner.shut()
        except Exception as error:
            log.get("transfer").error("transfer thread failed", **log.describe_error(error))
            self._on_defect()

    def _say_goodbye(self) -> None:
        self._turner.say_goodbye()
        deadline = self._clock() + self._close_timeout
        while not self._turner.heard_out() and self._clock() < deadline:
            self._once(min(deadline, self._turner.next_deadline()))

    def _once(self, deadline: float) -> None:
        self._wait(min(deadline - self._clock(), _LONGEST_WAIT))
        self.run_posted()
        self._turner.turn()

    def _wait(self, timeout: float) -> None:
        watched = self._turner.watched()
        if watched != self._watched:  # making a poller costs more than a poll, and links seldom change
            self._watched, self._poller = watched, zmq.Poller()
            self._poller.register(self._wake.fd, zmq.POLLIN)
            for pollable, also_writable in watched:
                self._poller.register(pollable, zmq.POLLIN | (zmq.POLLOUT if also_writable else 0))
        self._poller.poll(max(0, int(timeout * 1000 + 0.999)))
        self._wake.clear()

    def run_posted(self) -> None:
        """On the thread itself: what was posted up to now, without waiting for the next turn."""
        while self._commands:
            self._commands.popleft()()
