"""Requests that wait to be placed: strict order between classes, `FairOrder` within one, and bounded bypass.

A request too big for the room there is now must not block small ones behind it, and must not be starved by them. So
placement may look past it, at most `SCAN` places deep; each request placed over its head is counted, and after
`MAX_BYPASS` of them nobody behind it is offered until it is placed. A request that is placed again is the first of its
class. One that is held keeps its place in line, is not offered, and nobody waits for it. One that is set aside is in no
sum over the line either, until it is brought back to its old place.
"""

from collections.abc import Collection, Iterator

from baton.types import RequestId
from coordinator.core.counters import INTERNAL
from coordinator.core.drain_rate import Ahead, DrainRate
from coordinator.core.fair_order import OUTPUT_COST, Claim, FairOrder

SCAN = 16
MAX_BYPASS = 64
STRETCH = 4.0  # a prompt may be passed for so many times as long as it takes by itself
_MIN_RETRY, _MAX_RETRY = 1.0, 60.0  # seconds
_PLAIN, _PROBE = Claim(), Claim(INTERNAL)


class WaitingQueue:
    def __init__(self) -> None:
        self.rate = DrainRate()
        self._classes: dict[int, FairOrder] = {}
        self._claims: dict[RequestId, Claim] = {}  # also of those that were taken, until `forget`
        self._bypassed: dict[RequestId, int] = {}  # of those that wait
        self._held: set[RequestId] = set()
        self._aside: dict[RequestId, int] = {}  # those that are set aside, and how often they were bypassed

    def __len__(self) -> int:
        return len(self._bypassed)

    def push(self, request: RequestId, claim: Claim = _PLAIN) -> None:
        self._claims[request] = claim
        self._bypassed[request] = 0
        self._class(claim.level).push(request, claim)
        self.rate.backlogged(claim.arrived)

    def push_front(self, request: RequestId) -> None:
        """One that was taken before is to be placed again, or a probe."""
        claim = self._claims.setdefault(request, _PROBE)
        self._bypassed[request] = 0
        self._class(claim.level).push_front(request, claim)

    def hold(self, request: RequestId) -> None:
        """Until `release`, or until it is removed."""
        self._held.add(request)

    def release(self, request: RequestId) -> None:
        self._held.discard(request)

    def set_aside(self, request: RequestId) -> None:
        """Until it is brought back or removed. It is one that is offered."""
        self._class(self._claims[request].level).set_aside(request)
        self._aside[request] = self._bypassed.pop(request)
        if not self._bypassed:
            self.rate.empty()

    def bring_back(self, request: RequestId) -> None:
        self._class(self._claims[request].level).bring_back(request)
        self._bypassed[request] = self._aside.pop(request)

    @property
    def aside(self) -> int:
        """Requests that are set aside."""
        return len(self._aside)

    def remove(self, request: RequestId) -> None:
        """It has ended, wherever it is. Idempotent."""
        claim = self._claims.pop(request, None)
        if claim is not None:
            self._class(claim.level).remove(request)
        self._bypassed.pop(request, None)
        self._aside.pop(request, None)
        self._held.discard(request)
        if not self._bypassed:
            self.rate.empty()

    def candidates(self) -> list[RequestId]:
        """Who may be placed next, in order of preference."""
        found: list[RequestId] = []
        for request in self._in_order():
            if request in self._held:
                continue
            found.append(request)
            if self._bypassed[request] >= MAX_BYPASS or len(found) == SCAN:
                break
        return found

    def offered(self) -> Iterator[RequestId]:
        """All that wait for their turn, in no order."""
        return (request for request in self._bypassed if request not in self._held)

    def take(self, request: RequestId, now: float, yielding: Collection[str] = ()) -> None:
        """`request`, one of the candidates, is placed; these tenants of its class left room to it."""
        for ahead in self._in_order():
            if ahead == request:
                break
            self._bypassed[ahead] += ahead not in self._held
        claim = self._claims[request]
        self._class(claim.level).take(request, now, yielding)
        del self._bypassed[request]
        self._held.discard(request)
        self.rate.departed(claim.tokens, now)
        if not self._bypassed:
            self.rate.empty()

    def produced(self, request: RequestId, tokens: int, now: float) -> None:
        """Tokens of output, which its tenant pays for."""
        claim = self._claims.get(request)
        if claim is not None:
            self._class(claim.level).charge(claim, OUTPUT_COST * tokens, now)

    def refused(self, level: int, tenant: str, count: int, now: float) -> None:
        """So many requests found no room."""
        self._class(level).refused(tenant, count, now)

    def headroom(self, request: RequestId, most: float, now: float) -> float:
        """What part of a node a waiting request is to leave to other tenants of its class; see `Shares`. None if it is
        placed again, or may not be passed any more."""
        if self._bypassed[request] >= MAX_BYPASS:
            return 0.0
        return self._class(self._claims[request].level).headroom(request, most, now)

    def waiting(self, level: int, tenant: str | None = None) -> int:
        """Requests that wait and that a class of this level has to wait for: its own and those above it; or those of
        one tenant in the class."""
        if tenant is not None:
            return self._class(level).waiting(tenant)
        return sum(len(order) for each, order in self._classes.items() if each <= level)

    def waiting_tokens(self, level: int) -> int:
        """Prompt tokens of the requests that a class of this level has to wait for."""
        return sum(order.backlog()[0] for each, order in self._classes.items() if each <= level)

    @property
    def tokens(self) -> int:
        """Prompt tokens of all that wait."""
        return sum(order.backlog()[0] for order in self._classes.values())

    def ahead(self, claim: Claim, *, decode_full: bool) -> Ahead:
        tokens, requests = self._class(claim.level).ahead(claim)
        for level, order in self._classes.items():
            if level < claim.level:
                more = order.backlog()
                tokens, requests = tokens + more[0], requests + more[1]
        return Ahead(tokens, requests, decode_full)

    def retry_after(self, level: int = 0) -> float:
        """Seconds until what a class of this level waits for will have drained at the measured rate, 1 to 60."""
        rate = self.rate.requests_per_second
        seconds = self.waiting(level) / rate if rate else _MIN_RETRY
        return clamp_retry(seconds)

    def _in_order(self) -> Iterator[RequestId]:
        for level in sorted(self._classes):
            yield from self._classes[level]

    def _class(self, level: int) -> FairOrder:
        order = self._classes.get(level)
        if order is None:
            order = self._classes[level] = FairOrder()
        return order


def due(computing: float, arrived: float, deadline: float) -> float:
    """When a prompt that takes `computing` seconds by itself is due: the later, the longer it is, so that short ones
    pass it, but never later than its client's deadline."""
    return min(deadline, arrived + STRETCH * computing)


def clamp_retry(seconds: float) -> float:
    """What a client is told to wait, 1 to 60 seconds."""
    return min(max(seconds, _MIN_RETRY), _MAX_RETRY)
