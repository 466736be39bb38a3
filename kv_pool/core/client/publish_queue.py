"""What waits to be published, in which order, and when. What is not paced goes first; what is paced
keeps to a rate, counted in bytes. When the queue is full, what comes is dropped: what is longer in
it has cost more and is wanted sooner."""

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class PublishQueue(Generic[T]):
    """At most `most` jobs; `rate` in bytes a second. `now` is in seconds."""

    def __init__(self, most: int, rate: float) -> None:
        self._max_jobs = most
        self._bytes_per_second = rate
        self._unpaced: deque[T] = deque()
        self._paced: deque[tuple[T, int]] = deque()
        self._next_paced_at = 0.0  # when the next paced job may go

    def __len__(self) -> int:
        return len(self._unpaced) + len(self._paced)

    def add_job(self, job: T, size: int, *, paced: bool) -> bool:
        """`size` in bytes. False: there is no room."""
        if len(self) >= self._max_jobs:
            return False
        if paced:
            self._paced.append((job, size))
        else:
            self._unpaced.append(job)
        return True

    def take_ready_job(self, now: float) -> T | None:
        """The next job that may go now."""
        if self._unpaced:
            return self._unpaced.popleft()
        if not self._paced or now < self._next_paced_at:
            return None
        job, size = self._paced.popleft()
        self._next_paced_at = max(self._next_paced_at, now) + size / self._bytes_per_second
        return job

    def seconds_until_ready(self, now: float) -> float | None:
        """Seconds until a job may go; None if there is none."""
        if self._unpaced:
            return 0.0
        return max(0.0, self._next_paced_at - now) if self._paced else None

    def clear(self) -> list[T]:
        """All that waited."""
        jobs = [*self._unpaced, *(job for job, _ in self._paced)]
        self._unpaced.clear()
        self._paced.clear()
        return jobs
