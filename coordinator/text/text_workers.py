"""Threads for work on text, so that no body of one client holds up the event loop or everybody
else's text.

The work itself must leave Python's lock free, or take it in small pieces: `encode_batch` of
`tokenizers` does the former, Python code the latter. Long texts have threads of their own, so a
short one never waits for them, and among those of one kind the smaller goes first unless the larger
has waited long. What waits and what runs is bounded in bytes, for short and for long texts apart.
"""

import asyncio
import heapq
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from baton.errors import Overloaded
from baton.limits import MAX_PENDING_LONG_TEXT_BYTES, MAX_PENDING_SHORT_TEXT_BYTES
from baton.process.clock import Clock, monotonic_clock

MAX_INLINE_BYTES = (
    2 << 10
)  # so little text is worked on at once: it takes less than a hand-over and back
MAX_SHORT_BYTES = 64 << 10  # longer texts have threads of their own
_LONG_THREADS = 2
# Seconds for which smaller work may pass a text, for each of its bytes. A whole budget of short
# texts that have waited for less than 13 s is passed by one of 3 kB.
_SHORT_AGING_SECONDS_PER_BYTE = 2e-4
_LONG_AGING_SECONDS_PER_BYTE = 1e-5
_RETRY_SECONDS = 1.0  # seconds

Result = TypeVar("Result")


class TextWorkers:
    """Of one coordinator."""

    def __init__(
        self,
        most_short_bytes: int = MAX_PENDING_SHORT_TEXT_BYTES,
        most_long_bytes: int = MAX_PENDING_LONG_TEXT_BYTES,
        clock: Clock = monotonic_clock,
    ) -> None:
        self._short = _WorkerLane(
            "text-short", 1, most_short_bytes, _SHORT_AGING_SECONDS_PER_BYTE, clock
        )
        self._long = _WorkerLane(
            "text-long", _LONG_THREADS, most_long_bytes, _LONG_AGING_SECONDS_PER_BYTE, clock
        )

    @property
    def pending_bytes(self) -> int:
        """Bytes of text that wait for a thread or are worked on."""
        return self._short.pending_bytes + self._long.pending_bytes

    async def run_work(self, work: Callable[[], Result], size: int) -> Result:
        """The result of `work` on a text of `size` bytes. Raises Overloaded when too much text
        waits, and what `work` raises. Work that has begun goes on when the caller is cancelled."""
        if size <= MAX_INLINE_BYTES:
            return work()
        lane = self._short if size <= MAX_SHORT_BYTES else self._long
        result: Result = await lane.run_work(work, size)
        return result


@dataclass(order=True, slots=True)
class _TextJob:
    """`starts_by` is when nothing passes it any more, in seconds on the steady clock."""

    starts_by: float
    serial: int
    size_bytes: int = field(compare=False)
    work: Callable[[], Any] = field(compare=False)
    result: "asyncio.Future[Any]" = field(compare=False)


class _WorkerLane:
    """So many threads, and the jobs that wait for one. `pending_bytes` is the bytes of those and of
    what is worked on."""

    def __init__(
        self, name: str, threads: int, most_bytes: int, passed_per_byte: float, clock: Clock
    ) -> None:
        self.pending_bytes = 0
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free_threads = threads
        self._clock = clock
        self._max_pending_bytes = most_bytes
        self._aging_seconds_per_byte = passed_per_byte
        self._waiting: list[_TextJob] = []
        self._serial = count()

    async def run_work(self, work: Callable[[], Any], size: int) -> Any:
        if self.pending_bytes and self.pending_bytes + size > self._max_pending_bytes:
            raise Overloaded(
                f"{self.pending_bytes} bytes of text wait to be tokenized and {size} more would "
                "come: the limit is "
                f"{self._max_pending_bytes} for texts of this length",
                retry_after=_RETRY_SECONDS,
            )
        self.pending_bytes += size
        loop = asyncio.get_running_loop()
        due = self._clock() + size * self._aging_seconds_per_byte
        job = _TextJob(due, next(self._serial), size, work, loop.create_future())
        heapq.heappush(self._waiting, job)
        self._start_waiting(loop)
        try:
            return await job.result
        except asyncio.CancelledError:
            if job in self._waiting:
                self._waiting.remove(job)
                heapq.heapify(self._waiting)
                self.pending_bytes -= size
            raise

    def _start_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting and self._free_threads:
            job = heapq.heappop(self._waiting)
            self._free_threads -= 1
            self._start_job(job, loop)

    def _start_job(self, job: _TextJob, loop: asyncio.AbstractEventLoop) -> None:
        def ended(done: "Future[Any]") -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._finish_job, job, done, loop)

        self._executor.submit(job.work).add_done_callback(ended)

    def _finish_job(
        self, job: _TextJob, done: "Future[Any]", loop: asyncio.AbstractEventLoop
    ) -> None:
        self._free_threads += 1
        self.pending_bytes -= job.size_bytes
        error = done.exception()
        if not job.result.done():  # else its caller was cancelled
            if error is None:
                job.result.set_result(done.result())
            else:
                job.result.set_exception(error)
        self._start_waiting(loop)
