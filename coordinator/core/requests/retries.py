"""Requests that will be placed again but are not queued yet.

They back off after repeated failures, or are held back by the retry budget.
"""

from collections.abc import Mapping

from baton.types import Incarnation, RequestId
from coordinator.core.admission.waiting_queue import WaitingQueue
from coordinator.core.common.settings import retry_backoff_seconds
from coordinator.core.common.timers import RequestTimers
from coordinator.core.requests.record import RequestRecord
from coordinator.core.requests.retry_budget import RetryBudget


class RetryScheduler:
    """At most `most` requests are held back; they are released in order of failure, as the budget
    allows. Methods return whether a request has entered the queue."""

    def __init__(
        self,
        records: Mapping[RequestId, RequestRecord],
        queue: WaitingQueue,
        timers: RequestTimers,
        budget: RetryBudget,
        most: int,
    ) -> None:
        self.budget = budget
        self.held_back_total = 0  # ever
        self._records = records
        self._queue = queue
        self._timers = timers
        self._max_held = most
        self._backing_off: set[RequestId] = set()
        self._held_back_since: dict[RequestId, float] = {}  # since when

    def __len__(self) -> int:
        return len(self._backing_off) + len(self._held_back_since)

    @property
    def held_back_count(self) -> int:
        return len(self._held_back_since)

    def has_room_for_retry(self, now: float) -> bool:
        """Return whether one more retry that is not exempt can be accepted."""
        return len(self._held_back_since) < self._max_held or self.budget.available_retries(now) > 0

    def schedule_retry(
        self, record: RequestRecord, rest: float, now: float, *, exempt: bool
    ) -> bool:
        """Queue the request again after `rest` seconds, or when the budget allows."""
        if exempt or self.budget.try_spend(now):
            return self._start_backoff(record, rest, now)
        self.held_back_total += 1
        self._held_back_since[record.request.id] = now
        return False

    def release_within_budget(self, now: float) -> bool:
        """Release held-back requests as far as the budget allows now."""
        freed: list[RequestId] = []
        for request in self._held_back_since:
            if not self.budget.try_spend(now):
                break
            freed.append(request)
        return self._release_requests(freed, now)

    def on_node_lost(self, node: Incarnation, now: float) -> bool:
        """Release requests that failed on a node that turns out to be dead."""
        return self._release_requests(
            [
                request
                for request in self._held_back_since
                if node in self._records[request].avoided_nodes
            ],
            now,
        )

    def on_backoff_elapsed(self, record: RequestRecord) -> bool:
        record.retry_at = None
        self._backing_off.remove(record.request.id)
        self._queue.add_request_front(record.request.id)
        return True

    def forget_request(self, request: RequestId) -> None:
        """The request has ended. Idempotent."""
        self._backing_off.discard(request)
        self._held_back_since.pop(request, None)

    def next_release_at(self) -> float | None:
        """Return when the budget may next release a request, unless more requests arrive before."""
        return self.budget.next_expiry_at() if self._held_back_since else None

    def _release_requests(self, requests: list[RequestId], now: float) -> bool:
        queued = False
        for request in reversed(requests):  # so that the first of them is the first in line
            record = self._records[request]
            record.held_back_seconds += now - self._held_back_since.pop(request)
            queued |= self._start_backoff(record, retry_backoff_seconds(record.failure_count), now)
        return queued

    def _start_backoff(self, record: RequestRecord, rest: float, now: float) -> bool:
        if not rest:
            self._queue.add_request_front(record.request.id)
            return True
        record.retry_at = now + rest
        self._backing_off.add(record.request.id)
        self._timers.set_timer(record.request.id, record.next_timer_at())
        return False
