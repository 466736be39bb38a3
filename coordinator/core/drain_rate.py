"""How fast the queue drains, and how long a newcomer would wait in it.

Measured while somebody waits, so that it is what the bottleneck lets through, whichever that is; in requests, and in
prompt tokens. Older seconds count less: both figures are exponentially weighted.
"""

import math
from dataclasses import dataclass

MEMORY = 10.0  # seconds after which a measurement counts 1/e
_ENOUGH = 4.0  # departures, by weight, that make a measurement


@dataclass(frozen=True, slots=True)
class Ahead:
    """What would be served before a newcomer. `decode_full`: no decode node has a free place, so that whoever is placed
    waits for somebody else's end."""

    tokens: float
    requests: float
    decode_full: bool


class DrainRate:
    """Waits are what is ahead, over the measured rate."""

    def __init__(self) -> None:
        self._tokens = self._requests = self._seconds = 0.0
        self._began: float | None = None  # of the present backlog
        self._last = 0.0

    def backlogged(self, now: float) -> None:
        """Somebody waits. Idempotent."""
        if self._began is None:
            self._began = self._last = now

    def empty(self) -> None:
        """Nobody waits any more: time that passes from here on says nothing."""
        self._began = None

    def departed(self, tokens: int, now: float) -> None:
        """A request of so many prompt tokens was placed. What is placed at the very moment at which the line forms
        filled room that was there, which is no rate."""
        if self._began is None or now <= self._began:
            return
        passed = now - self._last
        faded = math.exp(-passed / MEMORY)
        self._tokens = self._tokens * faded + tokens
        self._requests = self._requests * faded + 1.0
        self._seconds = self._seconds * faded + passed
        self._last = now

    @property
    def requests_per_second(self) -> float | None:
        """None while too little is known."""
        return self._requests / self._seconds if self._known else None

    def predict_wait(self, ahead: Ahead) -> float:
        """Seconds; 0 while nothing is known."""
        if not self._known:
            return 0.0
        by_tokens = ahead.tokens * self._seconds / max(self._tokens, 1.0)
        by_requests = ahead.requests * self._seconds / self._requests if ahead.decode_full else 0.0
        return max(by_tokens, by_requests)

    @property
    def _known(self) -> bool:
        return self._requests >= _ENOUGH and self._seconds > 0.0
