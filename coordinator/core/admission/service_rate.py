"""How fast the queue drains, and how long a newcomer would wait in it.

Measured while somebody waits, so that it is what the bottleneck lets through, whichever that is; in
requests, and in prompt tokens. Older seconds count less: both figures are exponentially weighted.
"""

import math
from dataclasses import dataclass

DECAY_SECONDS = 10.0  # seconds after which a measurement counts 1/e
_MIN_PLACEMENTS = 4.0  # departures, by weight, that make a measurement


@dataclass(frozen=True, slots=True)
class BacklogAhead:
    """What would be served before a newcomer. `is_decode_full`: no decode node has a free place, so
    that whoever is placed waits for somebody else's end."""

    prompt_tokens: float
    requests: float
    is_decode_full: bool


class ServiceRate:
    """Waits are what is ahead, over the measured rate."""

    def __init__(self) -> None:
        self._tokens = self._requests = self._seconds = 0.0
        self._backlog_since: float | None = None  # of the present backlog
        self._last_placement_at = 0.0

    def start_backlog(self, now: float) -> None:
        """Somebody waits. Idempotent."""
        if self._backlog_since is None:
            self._backlog_since = self._last_placement_at = now

    def end_backlog(self) -> None:
        """Nobody waits any more: time that passes from here on says nothing."""
        self._backlog_since = None

    def record_placement(self, tokens: int, now: float) -> None:
        """A request of so many prompt tokens was placed. What is placed at the very moment at which
        the line forms filled room that was there, which is no rate."""
        if self._backlog_since is None or now <= self._backlog_since:
            return
        passed = now - self._last_placement_at
        faded = math.exp(-passed / DECAY_SECONDS)
        self._tokens = self._tokens * faded + tokens
        self._requests = self._requests * faded + 1.0
        self._seconds = self._seconds * faded + passed
        self._last_placement_at = now

    @property
    def requests_per_second(self) -> float | None:
        """None while too little is known."""
        return self._requests / self._seconds if self._is_known else None

    def predict_wait_seconds(self, ahead: BacklogAhead) -> float:
        """Seconds; 0 while nothing is known."""
        if not self._is_known:
            return 0.0
        by_tokens = ahead.prompt_tokens * self._seconds / max(self._tokens, 1.0)
        by_requests = (
            ahead.requests * self._seconds / self._requests if ahead.is_decode_full else 0.0
        )
        return max(by_tokens, by_requests)

    @property
    def _is_known(self) -> bool:
        return self._requests >= _MIN_PLACEMENTS and self._seconds > 0.0
