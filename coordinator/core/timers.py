"""One alarm per name, on nobody's clock."""

import heapq

from baton.types import RequestId

_SLACK = 1024  # stale entries that are not worth a sweep


class Timers:
    """Setting an alarm again replaces it. Stale heap entries are dropped when they surface, or when they are many."""

    def __init__(self) -> None:
        self._when: dict[RequestId, float] = {}
        self._heap: list[tuple[float, RequestId]] = []

    def set(self, name: RequestId, when: float) -> None:
        if self._when.get(name) != when:
            self._when[name] = when
            heapq.heappush(self._heap, (when, name))
            if len(self._heap) > 2 * len(self._when) + _SLACK:
                self._heap = [(time, name) for name, time in self._when.items()]
                heapq.heapify(self._heap)

    def clear(self, name: RequestId) -> None:
        self._when.pop(name, None)

    def due(self, now: float) -> list[RequestId]:
        """Names whose alarm is at `now` or before, in order; each alarm rings once."""
        found: list[RequestId] = []
        while (first := self.next()) is not None and first <= now:
            name = heapq.heappop(self._heap)[1]
            del self._when[name]
            found.append(name)
        return found

    def next(self) -> float | None:
        while self._heap and self._when.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
