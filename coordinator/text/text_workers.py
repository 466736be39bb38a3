"""Threads for work on text, so that a long text blocks neither the event loop nor other clients.

The work must release Python's lock, as `encode_batch` of `tokenizers` does, or hold it for short
times only, as Python code does. Long texts have separate threads, so short ones never wait for
them. Within a lane, smaller texts go first, unless a larger one has waited long. Pending work is
bounded in bytes, for short and long texts separately.
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

MAX_SHORT_BYTES = 64 << 10  # longer texts have separate threads
_LONG_THREADS = 2
# For so many seconds per byte of a text, smaller texts may overtake it.
_SHORT_AGING_SECONDS_PER_BYTE = 2e-4
_LONG_AGING_SECONDS_PER_BYTE = 1e-5
_RETRY_SECONDS = 1.0  # after which a refused client may try again

Result = TypeVar("Result")


class TextWorkers:
    """The text threads of one coordinator."""

    def __init__(
        self,
        max_short_bytes: int = MAX_PENDING_SHORT_TEXT_BYTES,
        max_long_bytes: int = MAX_PENDING_LONG_TEXT_BYTES,
        clock: Clock = monotonic_clock,
    ) -> None:
        self._short = _WorkerLane(
            "text-short", 1, max_short_bytes, _SHORT_AGING_SECONDS_PER_BYTE, clock
        )
        self._long = _WorkerLane(
            "text-long", _LONG_THREADS, max_long_bytes, _LONG_AGING_SECONDS_PER_BYTE, clock
        )

    @property
    def pending_bytes(self) -> int:
        """Bytes of text that wait for a thread or are being processed."""
        return self._short.pending_bytes + self._long.pending_bytes

    async def run_work(self, work: Callable[[], Result], size: int) -> Result:
        """Return the result of `work`, which processes a text of `size` bytes.

        Raises Overloaded when too much text waits, and what `work` raises. Work that has started
        continues when the caller is cancelled.
        """
        lane = self._short if size <= MAX_SHORT_BYTES else self._long
        result: Result = await lane.run_work(work, size)
        return result

    def close(self) -> None:
        """End the threads, after the work that they do. No more work may be given to them."""
        self._short.close()
        self._long.close()


@dataclass(order=True, slots=True)
class _TextJob:
    """One piece of work that waits for a thread."""

    starts_by: float  # monotonic seconds; jobs that arrive later cannot overtake it
    serial: int
    size_bytes: int = field(compare=False)
    work: Callable[[], Any] = field(compare=False)
    result: "asyncio.Future[Any]" = field(compare=False)


class _WorkerLane:
    """Some threads, and the jobs that wait for one of them."""

    def __init__(
        self, name: str, threads: int, max_bytes: int, aging_seconds_per_byte: float, clock: Clock
    ) -> None:
        self.pending_bytes = 0  # of waiting and running jobs
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free_threads = threads
        self._clock = clock
        self._max_pending_bytes = max_bytes
        self._aging_seconds_per_byte = aging_seconds_per_byte
        self._waiting: list[_TextJob] = []
        self._serial = count()

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)

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
            with suppress(RuntimeError):  # the loop is closed: no caller waits
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
