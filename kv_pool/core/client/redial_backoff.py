"""When a node dials its pool again. A pool that has gone may be back at any moment. One that
refuses (it serves another model, or has no memory) will do so again until something is changed, so
it is asked less and less often."""


class RedialBackoff:
    """`least` and `most` in seconds."""

    def __init__(self, least: float, most: float) -> None:
        self._min_seconds = least
        self._max_seconds = most
        self._next_seconds = least

    def reset(self) -> None:
        self._next_seconds = self._min_seconds

    def delay_after_disconnect(self) -> float:
        """Seconds to wait."""
        return self._min_seconds

    def delay_after_refusal(self) -> float:
        """Seconds to wait: twice as long each time, up to `most`."""
        pause, self._next_seconds = (
            self._next_seconds,
            min(2 * self._next_seconds, self._max_seconds),
        )
        return pause
