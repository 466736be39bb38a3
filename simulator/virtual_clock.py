"""Time that passes from event to event, so that minutes of it cost seconds."""

import heapq
import math
from collections.abc import Callable
from itertools import count


class VirtualClock:
    """Calls what is due, in order of time, and at equal times in the order of `call_at`."""

    def __init__(self, after_event: Callable[[], object]) -> None:
        """`after_event` is called after each event, at its time."""
        self.now = 0.0  # seconds
        self._after_event = after_event
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._serial = count()

    def call_at(self, when: float, call: Callable[[], object]) -> None:
        heapq.heappush(self._events, (when, next(self._serial), call))

    def run_events(self, until: float = math.inf) -> None:
        """Run every event that is due by `until`; `now` is then the time of the last one."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, call = heapq.heappop(events)
            call()
            self._after_event()
