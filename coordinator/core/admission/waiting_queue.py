"""Requests that wait to be placed: strict order between classes, fair queueing within, bounded
bypass.

A request too big for the present room must not block smaller ones behind it, and must not be
starved by them. So placement may look past it, at most `SCAN_DEPTH` places deep. Each request
placed ahead of it is counted, and after `MAX_BYPASS` of them none behind it is a candidate until it
is placed. A request that is placed again is the first of its class. A held request keeps its place
but is no candidate, and blocks none. A parked one is in no sum either, until it is unparked to its
old place.

The order of waiting requests within one class.

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
    """What the queue needs to know of a request."""

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
        ] = {}  # no place: again
        self._shares = TenantShares()
        self._virtual_time = 0.0
        self._serial = count()

    def __len__(self) -> int:
        return len(self._places) + len(self._requeued)

    def add_request(self, request: RequestId, claim: QueueEntry) -> None:
        place = (claim.due_at, next(self._serial), request)
        flow = self._flow(claim)
        if not flow.entries:
            flow.start_tag = max(flow.start_tag, self._virtual_time - MAX_CREDIT)
        insort(flow.entries, place)
        flow.backlog_tokens += claim.prompt_tokens
        if claim.tenant != INTERNAL_CLASS:
            self._shares.record_arrivals(claim.tenant, 1, claim.arrived_at)
        self._places[request] = (claim, place)

    def add_request_front(self, request: RequestId, claim: QueueEntry) -> None:
        self._requeued[request] = claim

    def park_request(self, request: RequestId) -> None:
        """Take the request out of all sums until `unpark_request`."""
        found = self._places.get(request)
        claim, place = found if found is not None else (self._requeued[request], None)
        self.remove_request(request)
        self._parked[request] = claim, place

    def unpark_request(self, request: RequestId) -> None:
        """Put a parked request back in its old place, or among those that are placed again."""
        claim, place = self._parked.pop(request)
        if place is None:
            self._requeued[request] = claim
            return
        flow = self._flow(claim)
        insort(flow.entries, place)
        flow.backlog_tokens += claim.prompt_tokens
        self._places[request] = (claim, place)

    def remove_request(self, request: RequestId) -> None:
        """Remove the request without a charge. Idempotent."""
        self._parked.pop(request, None)
        if self._requeued.pop(request, None) is not None or request not in self._places:
            return
        claim, place = self._places.pop(request)
        flow = self._flows[claim.tenant]
        flow.entries.remove(place)
        flow.backlog_tokens -= claim.prompt_tokens

    def take_request(self, request: RequestId, now: float, yielding: Collection[str] = ()) -> None:
        """Remove a request that is placed, and charge for its prompt unless it is placed again.
        Tenants in `yielding` were passed over to leave headroom; they gain no credit by that,
        because they would spend it all at once later."""
        if request not in self._places:
            self.remove_request(request)
            return
        claim = self._places[request][0]
        waiting = {name: flow for name, flow in self._flows.items() if flow.entries}
        passed = [
            waiting.pop(name) for name in yielding if name in waiting and name != claim.tenant
        ]
        first = min(flow.start_tag for flow in waiting.values())
        for flow in passed:
            flow.start_tag = max(flow.start_tag, first)
        self._virtual_time = max(self._virtual_time, first)
        self.remove_request(request)
        self.charge_tenant(claim, claim.prompt_tokens, now, turns=1)
        self._forget_idle()

    def charge_tenant(
        self, claim: QueueEntry, tokens: float, now: float, *, turns: int = 0
    ) -> None:
        """Charge the tenant `tokens`, for `turns` requests that begin."""
        flow = self._flow(claim)
        flow.start_tag += tokens / claim.weight
        if claim.tenant != INTERNAL_CLASS:
            self._shares.charge_tenant(claim.tenant, claim.weight, tokens, now, turns=turns)

    def record_rejection(self, tenant: str, count: int, now: float) -> None:
        """Count requests of the tenant that were rejected for lack of room."""
        self._shares.record_rejections(tenant, count, now)

    def headroom_share(self, request: RequestId, most: float, now: float) -> float:
        """See `TenantShares.headroom_share`; 0 for a request that is placed again."""
        return (
            self._shares.headroom_share(self._places[request][0].tenant, most, now)
            if request in self._places
            else 0.0
        )

    def __iter__(self) -> Iterator[RequestId]:
        """Yield requests in the order in which they would be taken."""
        yield from reversed(self._requeued)
        lines = [(flow.start_tag, name) for name, flow in self._flows.items() if flow.entries]
        heapq.heapify(lines)
        heads = {name: 0 for _, name in lines}
        while lines:
            start, name = heapq.heappop(lines)
            flow = self._flows[name]
            _, _, request = flow.entries[heads[name]]
            yield request
            heads[name] += 1
            if heads[name] < len(flow.entries):
                claim = self._places[request][0]
                heapq.heappush(lines, (start + claim.prompt_tokens / claim.weight, name))

    def count_waiting(self, tenant: str) -> int:
        """Count the tenant's requests that were not placed yet."""
        flow = self._flows.get(tenant)
        return len(flow.entries) if flow else 0

    def total_backlog(self) -> tuple[int, int]:
        """Return the waiting prompt tokens and requests."""
        again = sum(claim.prompt_tokens for claim in self._requeued.values())
        return again + sum(flow.backlog_tokens for flow in self._flows.values()), len(self)

    def backlog_ahead(self, claim: QueueEntry) -> tuple[float, float]:
        """Return the prompt tokens and requests ahead of one that arrives now, at most: its
        tenant's, and of each other tenant as much as its weight gives it meanwhile. Later arrivals
        are not counted."""
        mine = self._flows.get(claim.tenant)
        own = mine.backlog_tokens if mine else 0
        tokens = float(own + sum(again.prompt_tokens for again in self._requeued.values()))
        requests = float((len(mine.entries) if mine else 0) + len(self._requeued))
        for flow in self._flows.values():
            if flow is not mine and flow.backlog_tokens:
                part = min(
                    1.0,
                    (own + claim.prompt_tokens) * flow.weight / claim.weight / flow.backlog_tokens,
                )
                tokens += part * flow.backlog_tokens
                requests += part * len(flow.entries)
        return tokens, requests

    def _flow(self, claim: QueueEntry) -> _TenantFlow:
        flow = self._flows.get(claim.tenant)
        if flow is None:
            flow = self._flows[claim.tenant] = _TenantFlow(
                self._virtual_time - MAX_CREDIT, claim.weight
            )
        flow.weight = claim.weight
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
