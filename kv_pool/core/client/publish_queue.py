"""The queue of a node's publications: unpaced jobs first, paced jobs at a limited byte rate.

When the queue is full, new jobs are refused: those already queued were computed earlier and are
needed sooner.
"""

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class PublishQueue(Generic[T]):
    """A queue of at most `max_jobs` jobs. `now` is in seconds."""

    def __init__(self, max_jobs: int, bytes_per_second: float) -> None:
        self._max_jobs = max_jobs
        self._bytes_per_second = bytes_per_second
        self._unpaced: deque[T] = deque()
        self._paced: deque[tuple[T, int]] = deque()  # jobs with their size in bytes
        self._next_paced_at = 0.0  # seconds: when the next paced job may start

    def __len__(self) -> int:
        return len(self._unpaced) + len(self._paced)

    def add_job(self, job: T, size: int, *, paced: bool) -> bool:
        """Add a job of `size` bytes; returns False if the queue is full."""
        if len(self) >= self._max_jobs:
            return False
        if paced:
            self._paced.append((job, size))
        else:
            self._unpaced.append(job)
        return True

    def take_ready_job(self, now: float) -> T | None:
        """Remove and return the next job that may start now; None if there is none."""
        if self._unpaced:
            return self._unpaced.popleft()
        if not self._paced or now < self._next_paced_at:
            return None
        job, size = self._paced.popleft()
        self._next_paced_at = max(self._next_paced_at, now) + size / self._bytes_per_second
        return job

    def seconds_until_ready(self, now: float) -> float | None:
        """Return the seconds until a job may start; None if the queue is empty."""
        if self._unpaced:
            return 0.0
        return max(0.0, self._next_paced_at - now) if self._paced else None

    def clear(self) -> list[T]:
        """Remove and return all jobs."""
        jobs = [*self._unpaced, *(job for job, _ in self._paced)]
        self._unpaced.clear()
        self._paced.clear()
        return jobs
