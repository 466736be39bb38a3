"""A rate with an allowance for bursts: the token bucket (Turner, "New Directions in
Communications", 1986), paid afterwards. What is asked for is let in while there is at least one in
the bucket, and may leave it in debt. So a request larger than the burst is served, and its tenant
waits the longer for the next one."""

from dataclasses import dataclass

_ROUNDING = 1e-9  # what rounding leaves


@dataclass(slots=True)
class TokenBucket:
    """`rate` a second, at most `burst` saved up. Full at first."""

    rate: float
    burst: float
    level: float
    updated_at: float

    @classmethod
    def make_full(cls, rate: float, burst: float, now: float) -> "TokenBucket":
        return cls(rate, burst, burst, now)

    def wait_seconds(self, now: float) -> float:
        """Seconds until something is let in again; 0 is now."""
        self._refill(now)
        lacking = min(1.0, self.burst) - self.level
        return lacking / self.rate if lacking > _ROUNDING else 0.0

    def charge_tokens(self, amount: float, now: float) -> None:
        """Below 0: what was paid before is given back."""
        self._refill(now)
        self.level = min(self.burst, self.level - amount)

    def set_limits(self, rate: float, burst: float, now: float) -> None:
        """Other terms from now on; what is owed stays owed."""
        self._refill(now)
        self.rate, self.burst, self.level = rate, burst, min(self.level, burst)

    def _refill(self, now: float) -> None:
        self.level = min(self.burst, self.level + self.rate * max(0.0, now - self.updated_at))
        self.updated_at = max(self.updated_at, now)
