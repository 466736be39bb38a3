"""One timer per request; the caller supplies the time."""

import heapq

from baton.types import RequestId

_MAX_STALE_ENTRIES = 1024  # stale heap entries up to which the heap is not rebuilt


class RequestTimers:
    """A heap of deadlines. Setting a timer replaces the request's previous one; stale heap entries
    are dropped when they reach the top, or all at once when there are many."""

    def __init__(self) -> None:
        self._deadlines: dict[RequestId, float] = {}
        self._heap: list[tuple[float, RequestId]] = []

    def set_timer(self, name: RequestId, when: float) -> None:
        if self._deadlines.get(name) != when:
            self._deadlines[name] = when
            heapq.heappush(self._heap, (when, name))
            if len(self._heap) > 2 * len(self._deadlines) + _MAX_STALE_ENTRIES:
                self._heap = [(time, name) for name, time in self._deadlines.items()]
                heapq.heapify(self._heap)

    def cancel_timer(self, name: RequestId) -> None:
        self._deadlines.pop(name, None)

    def pop_due(self, now: float) -> list[RequestId]:
        """Remove and return the requests whose timer is due at `now`, earliest first."""
        found: list[RequestId] = []
        while (first := self.next_timer_at()) is not None and first <= now:
            name = heapq.heappop(self._heap)[1]
            del self._deadlines[name]
            found.append(name)
        return found

    def next_timer_at(self) -> float | None:
        while self._heap and self._deadlines.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
