"""When a node dials its pool again. A pool that has gone may be back at any moment. One that refuses (it serves another
model, or has no memory) will do so again until something is changed, so it is asked less and less often."""


class Redial:
    """`least` and `most` in seconds."""

    def __init__(self, least: float, most: float) -> None:
        self._least = least
        self._most = most
        self._next = least

    def attached(self) -> None:
        self._next = self._least

    def gone(self) -> float:
        """Seconds to wait."""
        return self._least

    def refused(self) -> float:
        """Seconds to wait: twice as long each time, up to `most`."""
        pause, self._next = self._next, min(2 * self._next, self._most)
        return pause
