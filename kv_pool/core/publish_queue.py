"""What waits to be published, in which order, and when. What is not paced goes first; what is paced keeps to a rate,
counted in bytes. When the queue is full, what comes is dropped: what is longer in it has cost more and is wanted
sooner."""

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class PublishQueue(Generic[T]):
    """At most `most` jobs; `rate` in bytes a second. `now` is in seconds."""

    def __init__(self, most: int, rate: float) -> None:
        self._most = most
        self._rate = rate
        self._prompt: deque[T] = deque()
        self._paced: deque[tuple[T, int]] = deque()
        self._free_at = 0.0  # when the next paced job may go

    def __len__(self) -> int:
        return len(self._prompt) + len(self._paced)

    def offer(self, job: T, size: int, *, paced: bool) -> bool:
        """`size` in bytes. False: there is no room."""
        if len(self) >= self._most:
            return False
        if paced:
            self._paced.append((job, size))
        else:
            self._prompt.append(job)
        return True

    def take(self, now: float) -> T | None:
        """The next job that may go now."""
        if self._prompt:
            return self._prompt.popleft()
        if not self._paced or now < self._free_at:
            return None
        job, size = self._paced.popleft()
        self._free_at = max(self._free_at, now) + size / self._rate
        return job

    def wait(self, now: float) -> float | None:
        """Seconds until a job may go; None if there is none."""
        if self._prompt:
            return 0.0
        return max(0.0, self._free_at - now) if self._paced else None

    def clear(self) -> list[T]:
        """All that waited."""
        jobs = [*self._prompt, *(job for job, _ in self._paced)]
        self._prompt.clear()
        self._paced.clear()
        return jobs
