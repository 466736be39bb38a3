"""A token bucket that is charged afterwards (Turner, "New Directions in Communications", 1986).

A request is admitted while the bucket holds at least one token, and may leave it in debt. So a
request larger than the burst is served, and its tenant waits longer for the next one.
"""

from dataclasses import dataclass

_ROUNDING = 1e-9  # error of floating point


@dataclass(slots=True)
class TokenBucket:
    """Refills at `rate` a second up to `burst`; full at first."""

    rate: float
    burst: float
    level: float
    updated_at: float

    @classmethod
    def make_full(cls, rate: float, burst: float, now: float) -> "TokenBucket":
        return cls(rate, burst, burst, now)

    def wait_seconds(self, now: float) -> float:
        """Return the seconds until the next admission; 0 is now."""
        self._refill(now)
        lacking = min(1.0, self.burst) - self.level
        return lacking / self.rate if lacking > _ROUNDING else 0.0

    def charge_tokens(self, amount: float, now: float) -> None:
        """Take tokens out; a negative amount is a refund."""
        self._refill(now)
        self.level = min(self.burst, self.level - amount)

    def set_limits(self, rate: float, burst: float, now: float) -> None:
        """Change the limits; debt is kept."""
        self._refill(now)
        self.rate, self.burst, self.level = rate, burst, min(self.level, burst)

    def _refill(self, now: float) -> None:
        self.level = min(self.burst, self.level + self.rate * max(0.0, now - self.updated_at))
        self.updated_at = max(self.updated_at, now)
