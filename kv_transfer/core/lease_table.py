"""Leases: rights that expire unless they are renewed."""

from collections.abc import Hashable
from heapq import heappop, heappush
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class LeaseTable(Generic[K]):
    """A set of leases by key, from which `pop_expired` takes every expired one.

    A heap of (deadline, key) with lazy deletion: every change of a deadline pushes an entry, and an
    entry counts only if it equals the key's present deadline. A lease is over when `now >=
    deadline`.
    """

    def __init__(self) -> None:
        self._deadline: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._pushed = 0  # breaks ties, so that keys are never compared

    def __len__(self) -> int:
        return len(self._deadline)

    def __contains__(self, key: K) -> bool:
        return key in self._deadline

    def set_deadline(self, key: K, deadline: float) -> None:
        """Grant a lease, or move its deadline either way."""
        self._deadline[key] = deadline
        self._pushed += 1
        heappush(self._heap, (deadline, self._pushed, key))
        if len(self._heap) > 64 + 4 * len(self._deadline):
            self._rebuild()

    def remove_lease(self, key: K) -> None:
        """Forget a lease, if there is one."""
        self._deadline.pop(key, None)

    def pop_expired(self, now: float) -> list[K]:
        """Remove and return every lease whose deadline has passed."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            deadline, _, key = heappop(self._heap)
            if self._deadline.get(key) == deadline:
                del self._deadline[key]
                expired.append(key)
        return expired

    def next_deadline(self) -> float | None:
        """The earliest deadline, None without leases."""
        while self._heap and self._deadline.get(self._heap[0][2]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _rebuild(self) -> None:
        self._heap = [
            (deadline, number, key)
            for number, (key, deadline) in enumerate(self._deadline.items(), start=self._pushed)
        ]
        self._heap.sort()
        self._pushed += len(self._heap)
