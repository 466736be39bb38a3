"""Requests that wait to be placed: strict order between classes, fair queueing within, bounded
bypass.

A request too big for the present room must not block smaller ones behind it, and must not be
starved by them. So placement may look past it, at most `SCAN_DEPTH` places deep. Each request
placed ahead of it is counted, and after `MAX_BYPASS` of them none behind it is a candidate until it
is placed. A request that is placed again is the first of its class. A held request keeps its place
but is no candidate, and blocks none. A parked one is in no sum either, until it is unparked to its
old place.
"""

from collections.abc import Collection, Iterator

from baton.types import RequestId
from coordinator.core.admission.fair_queue import OUTPUT_TOKEN_COST, FairQueue, QueueEntry
from coordinator.core.admission.service_rate import BacklogAhead, ServiceRate
from coordinator.core.common.counters import INTERNAL_CLASS

SCAN_DEPTH = 16  # candidates for placement
MAX_BYPASS = 64  # requests that may be placed ahead of an earlier one
MAX_STRETCH = 4.0  # a prompt may be overtaken for so many times its own prefill time
_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 60.0  # seconds
_DEFAULT_ENTRY, _PROBE_ENTRY = QueueEntry(), QueueEntry(INTERNAL_CLASS)


class WaitingQueue:
    def __init__(self) -> None:
        self.service_rate = ServiceRate()
        self._classes: dict[int, FairQueue] = {}
        self._entries: dict[
            RequestId, QueueEntry
        ] = {}  # also of those that were taken, until `forget`
        self._bypassed: dict[RequestId, int] = {}  # of those that wait
        self._held: set[RequestId] = set()
        self._parked: dict[
            RequestId, int
        ] = {}  # those that are set aside, and how often they were bypassed

    def __len__(self) -> int:
        return len(self._bypassed)

    def add_request(self, request: RequestId, claim: QueueEntry = _DEFAULT_ENTRY) -> None:
        self._entries[request] = claim
        self._bypassed[request] = 0
        self._class(claim.priority_level).add_request(request, claim)
        self.service_rate.start_backlog(claim.arrived_at)

    def add_request_front(self, request: RequestId) -> None:
        """Add a probe, or a request that is to be placed again."""
        claim = self._entries.setdefault(request, _PROBE_ENTRY)
        self._bypassed[request] = 0
        self._class(claim.priority_level).add_request_front(request, claim)

    def hold_request(self, request: RequestId) -> None:
        """Exclude the request from candidates until `release_request`."""
        self._held.add(request)

    def release_request(self, request: RequestId) -> None:
        self._held.discard(request)

    def park_request(self, request: RequestId) -> None:
        """Take a candidate out of all sums until `unpark_request`."""
        self._class(self._entries[request].priority_level).park_request(request)
        self._parked[request] = self._bypassed.pop(request)
        if not self._bypassed:
            self.service_rate.end_backlog()

    def unpark_request(self, request: RequestId) -> None:
        self._class(self._entries[request].priority_level).unpark_request(request)
        self._bypassed[request] = self._parked.pop(request)

    @property
    def parked_count(self) -> int:
        """Number of parked requests."""
        return len(self._parked)

    def remove_request(self, request: RequestId) -> None:
        """Remove the request, wherever it is. Idempotent."""
        claim = self._entries.pop(request, None)
        if claim is not None:
            self._class(claim.priority_level).remove_request(request)
        self._bypassed.pop(request, None)
        self._parked.pop(request, None)
        self._held.discard(request)
        if not self._bypassed:
            self.service_rate.end_backlog()

    def list_candidates(self) -> list[RequestId]:
        """Return the requests that may be placed next, in order of preference."""
        found: list[RequestId] = []
        for request in self._in_order():
            if request in self._held:
                continue
            found.append(request)
            if self._bypassed[request] >= MAX_BYPASS or len(found) == SCAN_DEPTH:
                break
        return found

    def list_eligible(self) -> Iterator[RequestId]:
        """Iterate over all waiting requests that are not held, in no order."""
        return (request for request in self._bypassed if request not in self._held)

    def take_request(self, request: RequestId, now: float, yielding: Collection[str] = ()) -> None:
        """Remove a candidate that is placed; `yielding` tenants of its class left room for it."""
        for ahead in self._in_order():
            if ahead == request:
                break
            self._bypassed[ahead] += ahead not in self._held
        claim = self._entries[request]
        self._class(claim.priority_level).take_request(request, now, yielding)
        del self._bypassed[request]
        self._held.discard(request)
        self.service_rate.record_placement(claim.prompt_tokens, now)
        if not self._bypassed:
            self.service_rate.end_backlog()

    def charge_output(self, request: RequestId, tokens: int, now: float) -> None:
        """Charge the request's tenant for output tokens."""
        claim = self._entries.get(request)
        if claim is not None:
            self._class(claim.priority_level).charge_tenant(claim, OUTPUT_TOKEN_COST * tokens, now)

    def record_rejection(self, level: int, tenant: str, count: int, now: float) -> None:
        """Count requests that were rejected for lack of room."""
        self._class(level).record_rejection(tenant, count, now)

    def headroom_share(self, request: RequestId, most: float, now: float) -> float:
        """Return the share of a node that the request must leave to other tenants of its class (see
        `TenantShares`); 0 if it is placed again or must not be bypassed any more."""
        if self._bypassed[request] >= MAX_BYPASS:
            return 0.0
        return self._class(self._entries[request].priority_level).headroom_share(request, most, now)

    def count_waiting(self, level: int, tenant: str | None = None) -> int:
        """Count the requests that a class has to wait for, its own and those of higher classes; or
        one tenant's within the class."""
        if tenant is not None:
            return self._class(level).count_waiting(tenant)
        return sum(len(order) for each, order in self._classes.items() if each <= level)

    def count_waiting_tokens(self, level: int) -> int:
        """Count the prompt tokens that a class has to wait for."""
        return sum(
            order.total_backlog()[0] for each, order in self._classes.items() if each <= level
        )

    @property
    def total_prompt_tokens(self) -> int:
        """Prompt tokens of all waiting requests."""
        return sum(order.total_backlog()[0] for order in self._classes.values())

    def backlog_ahead(self, claim: QueueEntry, *, decode_full: bool) -> BacklogAhead:
        tokens, requests = self._class(claim.priority_level).backlog_ahead(claim)
        for level, order in self._classes.items():
            if level < claim.priority_level:
                more = order.total_backlog()
                tokens, requests = tokens + more[0], requests + more[1]
        return BacklogAhead(tokens, requests, decode_full)

    def retry_after_seconds(self, level: int = 0) -> float:
        """Return the seconds, 1 to 60, in which the class's backlog drains."""
        rate = self.service_rate.requests_per_second
        seconds = self.count_waiting(level) / rate if rate else _MIN_RETRY_SECONDS
        return clamp_retry_after(seconds)

    def _in_order(self) -> Iterator[RequestId]:
        for level in sorted(self._classes):
            yield from self._classes[level]

    def _class(self, level: int) -> FairQueue:
        order = self._classes.get(level)
        if order is None:
            order = self._classes[level] = FairQueue()
        return order


def compute_due_time(computing: float, arrived: float, deadline: float) -> float:
    """Return when a prompt with this prefill time is due: the later, the longer it is, so that
    short ones pass it, but never after its deadline."""
    return min(deadline, arrived + MAX_STRETCH * computing)


def clamp_retry_after(seconds: float) -> float:
    """Clamp a retry delay to 1 to 60 seconds."""
    return min(max(seconds, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)
