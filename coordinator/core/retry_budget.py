"""How many requests may be placed again after a failure: a share of those that come in, and a few in any case.

Retries amplify trouble: a cluster that fails every attempt would be given each request `--max-attempts` times. So they
are held to a share of the offered load (Finagle's RetryBudget, and "Handling overload" in Beyer, Jones, Petoff, Murphy,
"Site Reliability Engineering", 2016). The floor lets a request that is alone have all of its attempts.
"""

from collections import deque

WINDOW = 10.0  # seconds
FLOOR = 30  # retries in any window, whatever the load
_GRAIN = 0.1  # seconds: requests that come within are counted as one entry


class RetryBudget:
    """`share` of the requests offered in the last `WINDOW` seconds may be retried in it, and at least `FLOOR`."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._offered: deque[tuple[float, int]] = deque()  # since when, how many
        self._total = 0
        self._retries: deque[float] = deque()

    def offered(self, now: float) -> None:
        """A request came in."""
        self._forget(now)
        if self._offered and now - self._offered[-1][0] < _GRAIN:
            since, count = self._offered.pop()
            self._offered.append((since, count + 1))
        else:
            self._offered.append((now, 1))
        self._total += 1

    def take(self, now: float) -> bool:
        """May one more be placed again? It counts from now on."""
        if self.left(now) <= 0:
            return False
        self._retries.append(now)
        return True

    def left(self, now: float) -> int:
        """Retries that would be allowed at this moment."""
        self._forget(now)
        return max(0, max(FLOOR, int(self.share * self._total)) - len(self._retries))

    def next(self) -> float | None:
        """When the oldest retry counts no more, which may let another one go."""
        return self._retries[0] + WINDOW if self._retries else None

    def _forget(self, now: float) -> None:
        while self._offered and self._offered[0][0] <= now - WINDOW:
            self._total -= self._offered.popleft()[1]
        while self._retries and self._retries[0] + WINDOW <= now:
            self._retries.popleft()
