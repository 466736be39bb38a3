"""The thread of a transfer plane: it waits for commands, messages and deadlines, and drives a loop.

`SenderLoop` is the loop of a KVSender and `ReceiverLoop` that of a KVReceiver.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

from baton.process import log
from baton.process.clock import Clock
from kv_transfer.transports.links import EventFd, Pollable

_MAX_WAIT_SECONDS = 3600.0  # poll takes no infinite deadline


class PlaneLoop(Protocol):
    """What a PlaneThread drives. All methods run on its thread."""

    def poll_once(self) -> None:
        """Do everything that is due, without waiting."""
        ...

    def next_deadline(self) -> float:
        """When `poll_once` is due if nothing arrives, on the plane's clock. Now if work is left."""
        ...

    def pollables(self) -> Sequence[tuple[Pollable, bool]]:
        """What wakes the thread when readable, and whether also when writable."""
        ...

    def begin_close(self) -> None:
        """End every open hand-off and tell the peers."""
        ...

    def is_drained(self) -> bool:
        """Whether every peer has acknowledged the ends that `begin_close` sent."""
        ...

    def close(self) -> None:
        """Close links and files. Called last."""
        ...


def exit_process() -> None:
    """End the process: without its transfer thread a node would fail all work that it is given.

    The supervisor starts it again."""
    log.flush_log()
    os._exit(1)


class PlaneThread:
    """Runs a PlaneLoop, and between its turns the posted commands in their order."""

    def __init__(
        self,
        name: str,
        loop: PlaneLoop,
        clock: Clock,
        close_timeout: float,
        on_internal_error: Callable[[], None],
    ) -> None:
        """`on_internal_error` is called when `loop` raises, which is a bug: the thread ends."""
        self._loop = loop
        self._clock = clock
        self._close_timeout = close_timeout
        self._on_internal_error = on_internal_error
        self._wakeup = EventFd()
        self._commands: deque[Callable[[], None]] = deque()
        self._registered: Sequence[tuple[Pollable, bool]] | None = None
        self._poller = zmq.Poller()
        self._is_stopping = False
        self._is_ended = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post_command(self, command: Callable[[], None]) -> bool:
        """Run a command on the thread. Call it from any thread; it never blocks.

        False when the thread has ended: the command will not run."""
        with self._lock:
            if self._is_ended:
                return False
            self._commands.append(command)
            os.eventfd_write(self._wakeup.fd, 1)  # this lock is enough: see `close`
        return True

    def close(self) -> None:
        """Run the commands posted so far, end all hand-offs and wait for the thread. Idempotent."""
        self._is_stopping = True
        self._wakeup.set()
        self._thread.join()
        with self._lock:
            self._is_ended = True  # no command writes to a descriptor that is closed
        self._wakeup.close()

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._wait_and_poll(self._loop.next_deadline())
            self.run_posted_commands()
            self._drain()
            with self._lock:
                self._is_ended = True
            self.run_posted_commands()  # posted since
            self._loop.begin_close()
            self._loop.close()
        except Exception as error:
            log.get_logger("transfer").error(
                "transfer thread failed", **log.get_error_fields(error)
            )
            self._on_internal_error()

    def _drain(self) -> None:
        self._loop.begin_close()
        deadline = self._clock() + self._close_timeout
        while not self._loop.is_drained() and self._clock() < deadline:
            self._wait_and_poll(min(deadline, self._loop.next_deadline()))

    def _wait_and_poll(self, deadline: float) -> None:
        self._wait(min(deadline - self._clock(), _MAX_WAIT_SECONDS))
        self.run_posted_commands()
        self._loop.poll_once()

    def _wait(self, timeout: float) -> None:
        watched = self._loop.pollables()
        if watched != self._registered:
            # Making a poller costs more than a poll, and links seldom change.
            self._registered, self._poller = watched, zmq.Poller()
            self._poller.register(self._wakeup.fd, zmq.POLLIN)
            for pollable, also_writable in watched:
                self._poller.register(pollable, zmq.POLLIN | (zmq.POLLOUT if also_writable else 0))
        self._poller.poll(max(0, int(timeout * 1000 + 0.999)))
        self._wakeup.clear()

    def run_posted_commands(self) -> None:
        """Run the commands posted up to now. Call it on the thread itself."""
        while self._commands:
            self._commands.popleft()()
