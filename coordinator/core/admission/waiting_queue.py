"""Requests that wait to be placed: strict order between classes, `FairQueue` within one, and
bounded bypass.

A request too big for the room there is now must not block small ones behind it, and must not be
starved by them. So placement may look past it, at most `SCAN_DEPTH` places deep; each request
placed over its head is counted, and after `MAX_BYPASS` of them nobody behind it is offered until it
is placed. A request that is placed again is the first of its class. One that is held keeps its
place in line, is not offered, and nobody waits for it. One that is set aside is in no sum over the
line either, until it is brought back to its old place.
"""

from collections.abc import Collection, Iterator

from baton.types import RequestId
from coordinator.core.admission.fair_queue import OUTPUT_TOKEN_COST, FairQueue, QueueEntry
from coordinator.core.admission.service_rate import BacklogAhead, ServiceRate
from coordinator.core.common.counters import INTERNAL_CLASS

SCAN_DEPTH = 16
MAX_BYPASS = 64
MAX_STRETCH = 4.0  # a prompt may be passed for so many times as long as it takes by itself
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
        """One that was taken before is to be placed again, or a probe."""
        claim = self._entries.setdefault(request, _PROBE_ENTRY)
        self._bypassed[request] = 0
        self._class(claim.priority_level).add_request_front(request, claim)

    def hold_request(self, request: RequestId) -> None:
        """Until `release_request`, or until it is removed."""
        self._held.add(request)

    def release_request(self, request: RequestId) -> None:
        self._held.discard(request)

    def park_request(self, request: RequestId) -> None:
        """Until it is brought back or removed. It is one that is offered."""
        self._class(self._entries[request].priority_level).park_request(request)
        self._parked[request] = self._bypassed.pop(request)
        if not self._bypassed:
            self.service_rate.end_backlog()

    def unpark_request(self, request: RequestId) -> None:
        self._class(self._entries[request].priority_level).unpark_request(request)
        self._bypassed[request] = self._parked.pop(request)

    @property
    def parked_count(self) -> int:
        """Requests that are set aside."""
        return len(self._parked)

    def remove_request(self, request: RequestId) -> None:
        """It has ended, wherever it is. Idempotent."""
        claim = self._entries.pop(request, None)
        if claim is not None:
            self._class(claim.priority_level).remove_request(request)
        self._bypassed.pop(request, None)
        self._parked.pop(request, None)
        self._held.discard(request)
        if not self._bypassed:
            self.service_rate.end_backlog()

    def list_candidates(self) -> list[RequestId]:
        """Who may be placed next, in order of preference."""
        found: list[RequestId] = []
        for request in self._in_order():
            if request in self._held:
                continue
            found.append(request)
            if self._bypassed[request] >= MAX_BYPASS or len(found) == SCAN_DEPTH:
                break
        return found

    def list_eligible(self) -> Iterator[RequestId]:
        """All that wait for their turn, in no order."""
        return (request for request in self._bypassed if request not in self._held)

    def take_request(self, request: RequestId, now: float, yielding: Collection[str] = ()) -> None:
        """`request`, one of the candidates, is placed; these tenants of its class left room to
        it."""
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
        """Tokens of output, which its tenant pays for."""
        claim = self._entries.get(request)
        if claim is not None:
            self._class(claim.priority_level).charge_tenant(claim, OUTPUT_TOKEN_COST * tokens, now)

    def record_rejection(self, level: int, tenant: str, count: int, now: float) -> None:
        """So many requests found no room."""
        self._class(level).record_rejection(tenant, count, now)

    def headroom_share(self, request: RequestId, most: float, now: float) -> float:
        """What part of a node a waiting request is to leave to other tenants of its class; see
        `TenantShares`. None if it is placed again, or may not be passed any more."""
        if self._bypassed[request] >= MAX_BYPASS:
            return 0.0
        return self._class(self._entries[request].priority_level).headroom_share(request, most, now)

    def count_waiting(self, level: int, tenant: str | None = None) -> int:
        """Requests that wait and that a class of this level has to wait for: its own and those
        above it; or those of one tenant in the class."""
        if tenant is not None:
            return self._class(level).count_waiting(tenant)
        return sum(len(order) for each, order in self._classes.items() if each <= level)

    def count_waiting_tokens(self, level: int) -> int:
        """Prompt tokens of the requests that a class of this level has to wait for."""
        return sum(
            order.total_backlog()[0] for each, order in self._classes.items() if each <= level
        )

    @property
    def total_prompt_tokens(self) -> int:
        """Prompt tokens of all that wait."""
        return sum(order.total_backlog()[0] for order in self._classes.values())

    def backlog_ahead(self, claim: QueueEntry, *, decode_full: bool) -> BacklogAhead:
        tokens, requests = self._class(claim.priority_level).backlog_ahead(claim)
        for level, order in self._classes.items():
            if level < claim.priority_level:
                more = order.total_backlog()
                tokens, requests = tokens + more[0], requests + more[1]
        return BacklogAhead(tokens, requests, decode_full)

    def retry_after_seconds(self, level: int = 0) -> float:
        """Seconds until what a class of this level waits for will have drained at the measured
        rate, 1 to 60."""
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
    """When a prompt that takes `computing` seconds by itself is due: the later, the longer it is,
    so that short ones pass it, but never later than its client's deadline."""
    return min(deadline, arrived + MAX_STRETCH * computing)


def clamp_retry_after(seconds: float) -> float:
    """What a client is told to wait, 1 to 60 seconds."""
    return min(max(seconds, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)
