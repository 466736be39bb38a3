"""Bounds the retries after failures to a share of recent requests, with a small floor.

Retries amplify trouble: a cluster that fails every attempt would be given each request
`--max-attempts` times. So they are bounded to a share of the offered load (Finagle's RetryBudget,
and "Handling overload" in Beyer, Jones, Petoff, Murphy, "Site Reliability Engineering", 2016). The
floor lets a lone request have all of its attempts.
"""

from collections import deque

WINDOW_SECONDS = 10.0  # over which requests and retries are counted
MIN_RETRIES = 30  # allowed in any window, whatever the load
_BUCKET_SECONDS = 0.1  # requests that arrive within are counted as one entry


class RetryBudget:
    """Allows `retry_share` of the requests of the last WINDOW_SECONDS, and at least MIN_RETRIES."""

    def __init__(self, share: float) -> None:
        self.retry_share = share
        self._request_counts: deque[tuple[float, int]] = deque()  # since when, how many
        self._total = 0
        self._retries: deque[float] = deque()

    def record_request(self, now: float) -> None:
        """Count a new request."""
        self._expire(now)
        if self._request_counts and now - self._request_counts[-1][0] < _BUCKET_SECONDS:
            since, count = self._request_counts.pop()
            self._request_counts.append((since, count + 1))
        else:
            self._request_counts.append((now, 1))
        self._total += 1

    def try_spend(self, now: float) -> bool:
        """Spend one retry if the budget has one; return whether it did."""
        if self.available_retries(now) <= 0:
            return False
        self._retries.append(now)
        return True

    def available_retries(self, now: float) -> int:
        """Return the retries that are allowed now."""
        self._expire(now)
        return max(0, max(MIN_RETRIES, int(self.retry_share * self._total)) - len(self._retries))

    def next_expiry_at(self) -> float | None:
        """Return when the oldest retry leaves the window and may allow another one."""
        return self._retries[0] + WINDOW_SECONDS if self._retries else None

    def _expire(self, now: float) -> None:
        while self._request_counts and self._request_counts[0][0] <= now - WINDOW_SECONDS:
            self._total -= self._request_counts.popleft()[1]
        while self._retries and self._retries[0] + WINDOW_SECONDS <= now:
            self._retries.popleft()
