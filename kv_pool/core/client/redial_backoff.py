"""The delay before a node dials its pool again, with exponential back-off after refusals.

A pool whose connection was lost may be back at any moment, so the delay stays short. A pool that
refuses the node (it serves another model, or has no memory) will refuse again until an operator
changes something, so the delay doubles.
"""


class RedialBackoff:
    """Delays between `min_seconds` and `max_seconds`."""

    def __init__(self, min_seconds: float, max_seconds: float) -> None:
        self._min_seconds = min_seconds
        self._max_seconds = max_seconds
        self._next_seconds = min_seconds  # after the next refusal

    def reset(self) -> None:
        """Start over after the node has attached."""
        self._next_seconds = self._min_seconds

    def delay_after_disconnect(self) -> float:
        """Return the seconds to wait after a lost connection."""
        return self._min_seconds

    def delay_after_refusal(self) -> float:
        """Return the seconds to wait after a refusal: doubled each time, up to the maximum."""
        delay = self._next_seconds
        self._next_seconds = min(2 * delay, self._max_seconds)
        return delay
