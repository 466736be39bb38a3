"""Requests that wait to be placed: strict order between classes, fair queueing within, bounded
bypass.

A request too big for the present room must not block smaller ones behind it, and must not be
starved by them. So placement may look past it, at most `SCAN_DEPTH` places deep. Each request
placed ahead of it is counted, and after `MAX_BYPASS` of them none behind it is a candidate until it
is placed. A request that is placed again is the first of its class. A held request keeps its place
but is no candidate, and blocks none. A parked one is in no sum either, until it is unparked to its
old place.

`FairQueue` orders the waiting requests of one class.

Between tenants: start-time fair queueing (Goyal, Vin, Cheng: "Start-time Fair Queueing", SIGCOMM
1996) over the cost in tokens divided by the tenant's weight. As in the Virtual Token Counter of
Sheng et al. ("Fairness in Serving Large Language Models", OSDI 2024) a tenant pays for a prompt
when it is placed and for its output as that is generated, because output lengths are not known
beforehand. An idle tenant saves up at most `MAX_CREDIT`, so that bursts of tenants below their
share are not delayed by those above it (Duda, Cheriton: "Borrowed-virtual-time scheduling", SOSP
1999).

Within a tenant: by the due time, which is fixed at arrival, so that a request that arrives later
than it never passes. Requests that are placed again come before all others, the last one first.
"""

import heapq
from bisect import insort
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import count

from baton.types import RequestId
from coordinator.core.admission.tenants import TenantShares
from coordinator.core.common.counters import INTERNAL_CLASS
from coordinator.core.estimates.workload import BacklogAhead, ServiceRate

MAX_CREDIT = 2048.0  # virtual time: tokens, for a weight of 1
OUTPUT_TOKEN_COST = 2.0  # in prompt tokens: the ratio that Sheng et al. use


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A waiting request: its tenant, its cost and when it is due."""

    tenant: str = "default"
    priority_level: int = 0
    weight: float = 1.0
    prompt_tokens: int = 0
    due_at: float = 0.0  # seconds; see `compute_due_time`
    arrived_at: float = 0.0


@dataclass(slots=True)
class _TenantFlow:
    """The waiting requests of one tenant."""

    start_tag: float  # virtual time at which its next request begins
    weight: float
    entries: list[tuple[float, int, RequestId]] = field(default_factory=list)
    backlog_tokens: int = 0  # prompt tokens


class FairQueue:
    """Waiting requests of one class; not thread-safe. A request is in it at most once."""

    def __init__(self) -> None:
        self._flows: dict[str, _TenantFlow] = {}
        self._requeued: dict[RequestId, QueueEntry] = {}  # the last one is first
        self._places: dict[RequestId, tuple[QueueEntry, tuple[float, int, RequestId]]] = {}
        self._parked: dict[
            RequestId, tuple[QueueEntry, tuple[float, int, RequestId] | None]
        ] = {}  # without a place if it was requeued
        self._shares = TenantShares()
        self._virtual_time = 0.0
        self._serial = count()

    def __len__(self) -> int:
        return len(self._places) + len(self._requeued)

    def add_request(self, request: RequestId, entry: QueueEntry) -> None:
        place = (entry.due_at, next(self._serial), request)
        flow = self._flow(entry)
        if not flow.entries:
            flow.start_tag = max(flow.start_tag, self._virtual_time - MAX_CREDIT)
        insort(flow.entries, place)
        flow.backlog_tokens += entry.prompt_tokens
        if entry.tenant != INTERNAL_CLASS:
            self._shares.record_arrivals(entry.tenant, 1, entry.arrived_at)
        self._places[request] = (entry, place)

    def add_request_front(self, request: RequestId, entry: QueueEntry) -> None:
        self._requeued[request] = entry

    def park_request(self, request: RequestId) -> None:
        """Take the request out of all sums until `unpark_request`."""
        found = self._places.get(request)
        entry, place = found if found is not None else (self._requeued[request], None)
        self.remove_request(request)
        self._parked[request] = entry, place

    def unpark_request(self, request: RequestId) -> None:
        """Put a parked request back in its old place, or among those that are placed again."""
        entry, place = self._parked.pop(request)
        if place is None:
            self._requeued[request] = entry
            return
        flow = self._flow(entry)
        insort(flow.entries, place)
        flow.backlog_tokens += entry.prompt_tokens
        self._places[request] = (entry, place)

    def remove_request(self, request: RequestId) -> None:
        """Remove the request without a charge. Idempotent."""
        self._parked.pop(request, None)
        if self._requeued.pop(request, None) is not None or request not in self._places:
            return
        entry, place = self._places.pop(request)
        flow = self._flows[entry.tenant]
        flow.entries.remove(place)
        flow.backlog_tokens -= entry.prompt_tokens

    def take_request(self, request: RequestId, now: float, yielding: Collection[str] = ()) -> None:
        """Remove a request that is placed, and charge for its prompt unless it is placed again.
        Tenants in `yielding` were passed over to leave headroom; they gain no credit by that,
        because they would spend it all at once later."""
        if request not in self._places:
            self.remove_request(request)
            return
        entry = self._places[request][0]
        waiting = {name: flow for name, flow in self._flows.items() if flow.entries}
        passed = [
            waiting.pop(name) for name in yielding if name in waiting and name != entry.tenant
        ]
        first = min(flow.start_tag for flow in waiting.values())
        for flow in passed:
            flow.start_tag = max(flow.start_tag, first)
        self._virtual_time = max(self._virtual_time, first)
        self.remove_request(request)
        self.charge_tenant(entry, entry.prompt_tokens, now, placements=1)
        self._forget_idle()

    def charge_tenant(
        self, entry: QueueEntry, tokens: float, now: float, *, placements: int = 0
    ) -> None:
        """Charge the tenant `tokens`, for `placements` requests that are placed."""
        flow = self._flow(entry)
        flow.start_tag += tokens / entry.weight
        if entry.tenant != INTERNAL_CLASS:
            self._shares.charge_tenant(
                entry.tenant, entry.weight, tokens, now, placements=placements
            )

    def record_rejection(self, tenant: str, count: int, now: float) -> None:
        """Count requests of the tenant that were rejected for lack of room."""
        self._shares.record_rejections(tenant, count, now)

    def headroom_share(self, request: RequestId, max_share: float, now: float) -> float:
        """See `TenantShares.headroom_share`; 0 for a request that is placed again."""
        return (
            self._shares.headroom_share(self._places[request][0].tenant, max_share, now)
            if request in self._places
            else 0.0
        )

    def __iter__(self) -> Iterator[RequestId]:
        """Yield requests in the order in which they would be taken."""
        yield from reversed(self._requeued)
        heads = [(flow.start_tag, name) for name, flow in self._flows.items() if flow.entries]
        heapq.heapify(heads)
        next_positions = {name: 0 for _, name in heads}
        while heads:
            start, name = heapq.heappop(heads)
            flow = self._flows[name]
            _, _, request = flow.entries[next_positions[name]]
            yield request
            next_positions[name] += 1
            if next_positions[name] < len(flow.entries):
                entry = self._places[request][0]
                heapq.heappush(heads, (start + entry.prompt_tokens / entry.weight, name))

    def count_waiting(self, tenant: str) -> int:
        """Count the tenant's requests that were not placed yet."""
        flow = self._flows.get(tenant)
        return len(flow.entries) if flow else 0

    def total_backlog(self) -> tuple[int, int]:
        """Return the waiting prompt tokens and requests."""
        requeued = sum(entry.prompt_tokens for entry in self._requeued.values())
        return requeued + sum(flow.backlog_tokens for flow in self._flows.values()), len(self)

    def backlog_ahead(self, entry: QueueEntry) -> tuple[float, float]:
        """Return the prompt tokens and requests ahead of one that arrives now, at most: its
        tenant's, and of each other tenant as much as its weight gives it meanwhile. Later arrivals
        are not counted."""
        mine = self._flows.get(entry.tenant)
        own = mine.backlog_tokens if mine else 0
        tokens = float(own + sum(requeued.prompt_tokens for requeued in self._requeued.values()))
        requests = float((len(mine.entries) if mine else 0) + len(self._requeued))
        for flow in self._flows.values():
            if flow is not mine and flow.backlog_tokens:
                share = min(
                    1.0,
                    (own + entry.prompt_tokens) * flow.weight / entry.weight / flow.backlog_tokens,
                )
                tokens += share * flow.backlog_tokens
                requests += share * len(flow.entries)
        return tokens, requests

    def _flow(self, entry: QueueEntry) -> _TenantFlow:
        flow = self._flows.get(entry.tenant)
        if flow is None:
            flow = self._flows[entry.tenant] = _TenantFlow(
                self._virtual_time - MAX_CREDIT, entry.weight
            )
        flow.weight = entry.weight
        return flow

    def _forget_idle(self) -> None:
        idle = [
            name
            for name, flow in self._flows.items()
            if not flow.entries and flow.start_tag <= self._virtual_time - MAX_CREDIT
        ]
        for name in idle:
            del self._flows[name]


SCAN_DEPTH = 16  # candidates for placement
MAX_BYPASS = 64  # requests that may be placed ahead of an earlier one
MAX_STRETCH = 4.0  # a prompt may be overtaken for so many times its own prefill time
_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 60.0  # seconds
_DEFAULT_ENTRY, _PROBE_ENTRY = QueueEntry(), QueueEntry(INTERNAL_CLASS)


class QueueBacklog:
    """What waits in all classes, and how long it will take."""

    def __init__(self, classes: defaultdict[int, FairQueue], service_rate: ServiceRate) -> None:
        self._classes = classes
        self._service_rate = service_rate

    def count_waiting(self, level: int, tenant: str | None = None) -> int:
        """Count the requests that a class has to wait for, its own and those of higher classes; or
        one tenant's within the class."""
        if tenant is not None:
            return self._classes[level].count_waiting(tenant)
        return sum(len(queue) for other, queue in self._classes.items() if other <= level)

    def count_waiting_tokens(self, level: int) -> int:
        """Count the prompt tokens that a class has to wait for."""
        return sum(
            queue.total_backlog()[0] for other, queue in self._classes.items() if other <= level
        )

    @property
    def total_prompt_tokens(self) -> int:
        """Prompt tokens of all waiting requests."""
        return sum(queue.total_backlog()[0] for queue in self._classes.values())

    def backlog_ahead(self, entry: QueueEntry, *, decode_full: bool) -> BacklogAhead:
        """Return the requests that would be placed before one that arrives now."""
        tokens, requests = self._classes[entry.priority_level].backlog_ahead(entry)
        for level, queue in self._classes.items():
            if level < entry.priority_level:
                more = queue.total_backlog()
                tokens, requests = tokens + more[0], requests + more[1]
        return BacklogAhead(tokens, requests, decode_full)

    def retry_after_seconds(self, level: int = 0) -> float:
        """Return the seconds, 1 to 60, in which the class's backlog drains."""
        rate = self._service_rate.requests_per_second
        seconds = self.count_waiting(level) / rate if rate else _MIN_RETRY_SECONDS
        return clamp_retry_after(seconds)

    def record_rejection(self, level: int, tenant: str, count: int, now: float) -> None:
        """Count requests that were rejected for lack of room: they are demand of the tenant."""
        self._classes[level].record_rejection(tenant, count, now)


class WaitingQueue:
    """The requests that wait, which of them may be placed next, and what tenants pay for it."""

    def __init__(self) -> None:
        self.service_rate = ServiceRate()
        self._classes: defaultdict[int, FairQueue] = defaultdict(FairQueue)  # by priority level
        self.backlog = QueueBacklog(self._classes, self.service_rate)
        # also of requests that were taken, until they are removed
        self._entries: dict[RequestId, QueueEntry] = {}
        # of the requests that wait, how often each was bypassed
        self._bypassed: dict[RequestId, int] = {}
        self._held: set[RequestId] = set()
        # of the parked requests, how often each was bypassed
        self._parked: dict[RequestId, int] = {}

    def __len__(self) -> int:
        return len(self._bypassed)

    def add_request(self, request: RequestId, entry: QueueEntry = _DEFAULT_ENTRY) -> None:
        self._entries[request] = entry
        self._bypassed[request] = 0
        self._classes[entry.priority_level].add_request(request, entry)
        self.service_rate.start_backlog(entry.arrived_at)

    def add_request_front(self, request: RequestId) -> None:
        """Add a probe, or a request that is to be placed again."""
        entry = self._entries.setdefault(request, _PROBE_ENTRY)
        self._bypassed[request] = 0
        self._classes[entry.priority_level].add_request_front(request, entry)

    def hold_request(self, request: RequestId) -> None:
        """Exclude the request from candidates until `release_request`."""
        self._held.add(request)

    def release_request(self, request: RequestId) -> None:
        self._held.discard(request)

    def park_request(self, request: RequestId) -> None:
        """Take a candidate out of all sums until `unpark_request`."""
        self._class_of(request).park_request(request)
        self._parked[request] = self._bypassed.pop(request)
        if not self._bypassed:
            self.service_rate.end_backlog()

    def unpark_request(self, request: RequestId) -> None:
        self._class_of(request).unpark_request(request)
        self._bypassed[request] = self._parked.pop(request)

    def remove_request(self, request: RequestId) -> None:
        """Remove the request, wherever it is. Idempotent."""
        entry = self._entries.pop(request, None)
        if entry is not None:
            self._classes[entry.priority_level].remove_request(request)
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
        entry = self._entries[request]
        self._classes[entry.priority_level].take_request(request, now, yielding)
        del self._bypassed[request]
        self._held.discard(request)
        self.service_rate.record_placement(entry.prompt_tokens, now)
        if not self._bypassed:
            self.service_rate.end_backlog()

    def charge_output(self, request: RequestId, tokens: int, now: float) -> None:
        """Charge the request's tenant for output tokens."""
        entry = self._entries.get(request)
        if entry is not None:
            self._class_of(request).charge_tenant(entry, OUTPUT_TOKEN_COST * tokens, now)

    def headroom_share(self, request: RequestId, max_share: float, now: float) -> float:
        """Return the share of a node that the request must leave to other tenants of its class (see
        `TenantShares`); 0 if it is placed again or must not be bypassed any more."""
        if self._bypassed[request] >= MAX_BYPASS:
            return 0.0
        return self._class_of(request).headroom_share(request, max_share, now)

    def _class_of(self, request: RequestId) -> FairQueue:
        return self._classes[self._entries[request].priority_level]

    def _in_order(self) -> Iterator[RequestId]:
        for level in sorted(self._classes):
            yield from self._classes[level]


def compute_due_time(computing: float, arrived: float, deadline: float) -> float:
    """Return when a prompt with this prefill time is due: the later, the longer it is, so that
    short ones pass it, but never after its deadline."""
    return min(deadline, arrived + MAX_STRETCH * computing)


def clamp_retry_after(seconds: float) -> float:
    """Clamp a retry delay to 1 to 60 seconds."""
    return min(max(seconds, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)
