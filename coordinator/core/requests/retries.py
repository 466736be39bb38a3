"""Requests that will be placed again but are not queued yet.

They back off after repeated failures, or are held back by the retry budget.

Bounds the retries after failures to a share of recent requests, with a small floor.

Retries amplify trouble: a cluster that fails every attempt would be given each request
`--max-attempts` times. So they are bounded to a share of the offered load (Finagle's RetryBudget,
and "Handling overload" in Beyer, Jones, Petoff, Murphy, "Site Reliability Engineering", 2016). The
floor lets a lone request have all of its attempts.
"""

from collections import deque
from collections.abc import Mapping

from baton.types import Incarnation, RequestId
from coordinator.core.admission.waiting_queue import WaitingQueue
from coordinator.core.common.settings import retry_backoff_seconds
from coordinator.core.common.timers import RequestTimers
from coordinator.core.requests.record import RequestRecord

WINDOW_SECONDS = 10.0  # over which requests and retries are counted
MIN_RETRIES = 30  # allowed in any window, whatever the load
_BUCKET_SECONDS = 0.1  # requests that arrive within are counted as one entry


class RetryBudget:
    """Allows `retry_share` of the requests of the last WINDOW_SECONDS, and at least MIN_RETRIES."""

    def __init__(self, share: float) -> None:
        self.retry_share = share
        self._request_counts: deque[tuple[float, int]] = deque()  # since when, how many
        self._total = 0
        self._retries: deque[float] = deque()

    def record_request(self, now: float) -> None:
        """Count a new request."""
        self._expire(now)
        if self._request_counts and now - self._request_counts[-1][0] < _BUCKET_SECONDS:
            since, count = self._request_counts.pop()
            self._request_counts.append((since, count + 1))
        else:
            self._request_counts.append((now, 1))
        self._total += 1

    def try_spend(self, now: float) -> bool:
        """Spend one retry if the budget has one; return whether it did."""
        if self.available_retries(now) <= 0:
            return False
        self._retries.append(now)
        return True

    def available_retries(self, now: float) -> int:
        """Return the retries that are allowed now."""
        self._expire(now)
        return max(0, max(MIN_RETRIES, int(self.retry_share * self._total)) - len(self._retries))

    def next_expiry_at(self) -> float | None:
        """Return when the oldest retry leaves the window and may allow another one."""
        return self._retries[0] + WINDOW_SECONDS if self._retries else None

    def _expire(self, now: float) -> None:
        while self._request_counts and self._request_counts[0][0] <= now - WINDOW_SECONDS:
            self._total -= self._request_counts.popleft()[1]
        while self._retries and self._retries[0] + WINDOW_SECONDS <= now:
            self._retries.popleft()


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
