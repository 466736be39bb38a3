"""Requests that wait to be placed: first in, first out, with bounded bypass.

A request too big for the room there is now must not block small ones behind it, and must not be starved by them. So
placement may look past it, at most `SCAN` places deep; each request placed over its head is counted, and after
`MAX_BYPASS` of them nobody behind it is offered until it is placed. A request that is placed again goes to the head.
One that is held keeps its place in line, is not offered, and nobody waits for it.
"""

from collections import OrderedDict, deque

from baton.types import RequestId

SCAN = 16
MAX_BYPASS = 64
_RECENT = 64  # departures from which the drain rate is estimated
_MIN_RETRY, _MAX_RETRY = 1.0, 60.0  # seconds


class WaitingQueue:
    def __init__(self) -> None:
        self._bypassed: OrderedDict[RequestId, int] = OrderedDict()  # in order of the queue
        self._held: set[RequestId] = set()
        self._departures: deque[float] = deque(maxlen=_RECENT)

    def __len__(self) -> int:
        return len(self._bypassed)

    def push(self, request: RequestId) -> None:
        self._bypassed[request] = 0

    def push_front(self, request: RequestId) -> None:
        self._bypassed[request] = 0
        self._bypassed.move_to_end(request, last=False)

    def hold(self, request: RequestId) -> None:
        """Until `release`, or until it is removed."""
        self._held.add(request)

    def release(self, request: RequestId) -> None:
        self._held.discard(request)

    def remove(self, request: RequestId) -> None:
        self._bypassed.pop(request, None)
        self._held.discard(request)

    def candidates(self) -> list[RequestId]:
        """Who may be placed next, in order of preference."""
        found: list[RequestId] = []
        for request, bypassed in self._bypassed.items():
            if request in self._held:
                continue
            found.append(request)
            if bypassed >= MAX_BYPASS or len(found) == SCAN:
                break
        return found

    def take(self, request: RequestId, now: float) -> None:
        """`request`, one of the candidates, is placed."""
        for ahead in self._bypassed:
            if ahead == request:
                break
            self._bypassed[ahead] += ahead not in self._held
        del self._bypassed[request]
        self._departures.append(now)

    def retry_after(self, now: float) -> float:
        """Seconds until a queue of this length will have drained at the recent rate, 1 to 60."""
        if not self._departures:
            return _MIN_RETRY
        seconds = len(self._bypassed) * (now - self._departures[0]) / len(self._departures)
        return min(max(seconds, _MIN_RETRY), _MAX_RETRY)
