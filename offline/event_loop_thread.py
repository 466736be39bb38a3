"""An event loop on a thread of its own, for callers that have none, or whose own loop runs."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class EventLoopThread:
    """Runs coroutines for other threads until it is closed."""

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # so that no work is handed over after the end
        self._is_closed = False
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_of_this_process(self) -> bool:
        """Whether the thread runs here: a forked process has a copy of this object alone."""
        return os.getpid() == self._pid

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end and return its result.

        KeyboardInterrupt in the waiting thread cancels the work, and is raised when it has ended.
        Raises CancelledError if the thread is closed meanwhile, and RuntimeError if it was before.
        """
        result: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda task: _pass_on(task, result))

        def cancel() -> None:
            if tasks:
                tasks[0].cancel()
            else:  # interrupted before it was handed over
                work.close()
                result.set_exception(CancelledError())

        try:
            with self._lock:
                if self._is_closed:
                    work.close()
                    raise RuntimeError("the event loop is closed")
                self._loop.call_soon_threadsafe(start)
            return result.result()
        except KeyboardInterrupt:
            self._loop.call_soon_threadsafe(cancel)
            wait([result])
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the loop with its tasks, and the thread. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._is_closed = True
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            with suppress(RuntimeError):  # Python ends: threads can no longer be started to help
                self._runner.close()  # cancels what is left, and ends the loop's own threads


def _pass_on(task: "asyncio.Task[T]", result: "Future[T]") -> None:
    if task.cancelled():
        result.set_exception(CancelledError())
    elif (error := task.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(task.result())
