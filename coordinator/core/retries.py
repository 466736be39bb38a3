"""Requests that are to be placed again and are not in line yet: they rest after failures that followed one upon the
other, or are held back by the retry budget."""

from collections.abc import Mapping

from baton.types import Incarnation, RequestId
from coordinator.core.queue import WaitingQueue
from coordinator.core.record import Record
from coordinator.core.retry_budget import RetryBudget
from coordinator.core.settings import rest_after
from coordinator.core.timers import Timers


class Retries:
    """At most `most` are held back; those go on in the order in which they failed, as the budget allows. Methods say
    whether somebody came into the queue."""

    def __init__(
        self, records: Mapping[RequestId, Record], queue: WaitingQueue, timers: Timers, budget: RetryBudget, most: int
    ) -> None:
        self.budget = budget
        self.held_back = 0  # ever
        self._records = records
        self._queue = queue
        self._timers = timers
        self._most = most
        self._resting: set[RequestId] = set()
        self._held: dict[RequestId, float] = {}  # since when

    def __len__(self) -> int:
        return len(self._resting) + len(self._held)

    @property
    def held(self) -> int:
        return len(self._held)

    def has_room(self, now: float) -> bool:
        """Can one more that is not exempt be taken?"""
        return len(self._held) < self._most or self.budget.left(now) > 0

    def again(self, record: Record, rest: float, now: float, *, exempt: bool) -> bool:
        """In `rest` seconds, or when the budget allows."""
        if exempt or self.budget.take(now):
            return self._resume(record, rest, now)
        self.held_back += 1
        self._held[record.request.id] = now
        return False

    def let_go(self, now: float) -> bool:
        """What the budget allows by now."""
        freed: list[RequestId] = []
        for request in self._held:
            if not self.budget.take(now):
                break
            freed.append(request)
        return self._release(freed, now)

    def lost(self, node: Incarnation, now: float) -> bool:
        """What failed on a node that turns out to be dead is held back no more."""
        return self._release([request for request in self._held if node in self._records[request].avoid], now)

    def rested(self, record: Record) -> bool:
        record.not_before = None
        self._resting.remove(record.request.id)
        self._queue.push_front(record.request.id)
        return True

    def forget(self, request: RequestId) -> None:
        """It has ended. Idempotent."""
        self._resting.discard(request)
        self._held.pop(request, None)

    def next(self) -> float | None:
        """When the budget may let somebody go, unless more requests come in before that."""
        return self.budget.next() if self._held else None

    def _release(self, requests: list[RequestId], now: float) -> bool:
        queued = False
        for request in reversed(requests):  # so that the first of them is the first in line
            record = self._records[request]
            record.held_back += now - self._held.pop(request)
            queued |= self._resume(record, rest_after(record.failures), now)
        return queued

    def _resume(self, record: Record, rest: float, now: float) -> bool:
        if not rest:
            self._queue.push_front(record.request.id)
            return True
        record.not_before = now + rest
        self._resting.add(record.request.id)
        self._timers.set(record.request.id, record.next_due())
        return False
