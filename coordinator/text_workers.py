"""Threads for work on text, so that no body of one client holds up the event loop or everybody else's text.

The work itself must leave Python's lock free, or take it in small pieces: `encode_batch` of `tokenizers` does the
former, Python code the latter. Long texts have threads of their own, so a short one never waits for them, and among
long ones the smaller goes first unless the larger has waited long. What waits and what runs is bounded in bytes.
"""

import asyncio
import heapq
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from baton.clock import Clock, steady
from baton.errors import Overloaded
from baton.limits import MAX_TEXT_BYTES

INLINE_BYTES = 2 << 10  # so little text is worked on at once: it takes less than a hand-over and back
SHORT_BYTES = 64 << 10  # longer texts have threads of their own
_LONG_THREADS = 2
_PASSED_PER_BYTE = 1e-5  # seconds for which smaller work may pass a text, for each of its bytes
_RETRY = 1.0  # seconds

Result = TypeVar("Result")


class TextWorkers:
    """Of one coordinator. `held` is the bytes of text that wait for a thread or are worked on."""

    def __init__(self, most_bytes: int = MAX_TEXT_BYTES, clock: Clock = steady) -> None:
        self.held = 0
        self._most_bytes = most_bytes
        self._short = _Lane("text-short", 1, clock, self._release)
        self._long = _Lane("text-long", _LONG_THREADS, clock, self._release)

    async def run(self, work: Callable[[], Result], size: int) -> Result:
        """The result of `work` on a text of `size` bytes. Raises Overloaded when too much text waits, and what `work`
        raises. Work that has begun goes on when the caller is cancelled."""
        if size <= INLINE_BYTES:
            return work()
        if self.held and self.held + size > self._most_bytes:
            raise Overloaded(
                f"{self.held} bytes of text wait to be tokenized and {size} more would come: the limit is "
                f"{self._most_bytes}",
                retry_after=_RETRY,
            )
        self.held += size
        lane = self._short if size <= SHORT_BYTES else self._long
        result: Result = await lane.run(work, size)
        return result

    def _release(self, size: int) -> None:
        self.held -= size


@dataclass(order=True, slots=True)
class _Job:
    """`due` is when nothing passes it any more, in seconds on the steady clock."""

    due: float
    serial: int
    size: int = field(compare=False)
    work: Callable[[], Any] = field(compare=False)
    result: "asyncio.Future[Any]" = field(compare=False)


class _Lane:
    """So many threads, and the jobs that wait for one. `release` hears of each job's size once it is over."""

    def __init__(self, name: str, threads: int, clock: Clock, release: Callable[[int], None]) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free = threads
        self._clock = clock
        self._release = release
        self._waiting: list[_Job] = []
        self._serial = count()

    async def run(self, work: Callable[[], Any], size: int) -> Any:
        loop = asyncio.get_running_loop()
        due = self._clock() + size * _PASSED_PER_BYTE
        job = _Job(due, next(self._serial), size, work, loop.create_future())
        heapq.heappush(self._waiting, job)
        self._start_waiting(loop)
        try:
            return await job.result
        except asyncio.CancelledError:
            if job in self._waiting:
                self._waiting.remove(job)
                heapq.heapify(self._waiting)
                self._release(size)
            raise

    def _start_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting and self._free:
            job = heapq.heappop(self._waiting)
            self._free -= 1
            self._start(job, loop)

    def _start(self, job: _Job, loop: asyncio.AbstractEventLoop) -> None:
        def ended(done: "Future[Any]") -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._end, job, done, loop)

        self._executor.submit(job.work).add_done_callback(ended)

    def _end(self, job: _Job, done: "Future[Any]", loop: asyncio.AbstractEventLoop) -> None:
        self._free += 1
        self._release(job.size)
        error = done.exception()
        if not job.result.done():  # else its caller was cancelled
            if error is None:
                job.result.set_result(done.result())
            else:
                job.result.set_exception(error)
        self._start_waiting(loop)
