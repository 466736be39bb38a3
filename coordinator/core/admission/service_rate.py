"""Measures how fast the queue drains, and predicts the wait of a new request.

The rate is measured while requests wait, so it is the rate of whatever is the bottleneck; in
requests and in prompt tokens. Measurements decay exponentially.
"""

import math
from dataclasses import dataclass

DECAY_SECONDS = 10.0  # after which a measurement counts 1/e
_MIN_PLACEMENTS = 4.0  # placements, by weight, that make a measurement


@dataclass(frozen=True, slots=True)
class BacklogAhead:
    """What would be served before a new request."""

    prompt_tokens: float
    requests: float
    # no decode node has a free slot, so a request must also wait for others to end
    is_decode_full: bool


class ServiceRate:
    """The predicted wait is the backlog ahead over the measured rate."""

    def __init__(self) -> None:
        self._tokens = self._requests = self._seconds = 0.0
        self._backlog_since: float | None = None  # of the present backlog
        self._last_placement_at = 0.0

    def start_backlog(self, now: float) -> None:
        """A request waits. Idempotent."""
        if self._backlog_since is None:
            self._backlog_since = self._last_placement_at = now

    def end_backlog(self) -> None:
        """No request waits any more: the time from here on is not measured."""
        self._backlog_since = None

    def record_placement(self, tokens: int, now: float) -> None:
        """Record that a request was placed. Placements at the moment when the backlog begins are
        ignored: they filled room that was free."""
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
        """None while too little was measured."""
        return self._requests / self._seconds if self._is_known else None

    def predict_wait_seconds(self, ahead: BacklogAhead) -> float:
        """Return the predicted wait in seconds; 0 while too little was measured."""
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
