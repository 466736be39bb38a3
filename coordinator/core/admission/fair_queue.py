"""The order of waiting requests within one class.

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
from coordinator.core.admission.tenant_shares import TenantShares
from coordinator.core.common.counters import INTERNAL_CLASS

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
