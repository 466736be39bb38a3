"""What each tenant of a class has had lately, and whether that was more than its share.

Who has had more leaves room to the others: it gets no place that would be one of the last few, so that they find one
free when they come. This is trunk reservation, which keeps a stream's blocking low for a small part of the capacity
(Kelly, "Loss Networks", The Annals of Applied Probability, 1991). Order in the queue alone cannot do that: where one
tenant takes all that is left, everybody waits until somebody's answer ends.
"""

from coordinator.core.recent_work import WINDOW, RecentWork

_SLACK = 1.25  # of a share: chance makes tenants that ask for the same differ by less


class Shares:
    """Of one class. A tenant counts for `WINDOW` seconds after it was last charged."""

    def __init__(self) -> None:
        self._recent = RecentWork()
        self._weights: dict[str, float] = {}  # of those that count: who was served longest ago is first
        self._last: dict[str, float] = {}
        self._cost = self._weight = 0.0  # of all of them

    def charge(self, tenant: str, weight: float, cost: float, now: float) -> None:
        self._forget_idle(now)
        if self._recent.keep_scale(now):
            self._cost = sum(self._recent.of(each) for each in self._weights)
        self._weight += weight - self._weights.pop(tenant, 0.0)
        self._weights[tenant] = weight
        self._last[tenant] = now
        self._recent.add(tenant, cost, now)
        self._cost += cost * self._recent.unit(now)

    def of_others(self, tenant: str, now: float) -> float:
        """What part of all that was served lately the others had, if this tenant had more than its share; else 0."""
        self._forget_idle(now)
        if len(self._weights) < 2 or tenant not in self._weights or not self._cost:
            return 0.0
        part = self._recent.of(tenant) / self._cost
        return max(0.0, 1.0 - part) if part > _SLACK * self._weights[tenant] / self._weight else 0.0

    def _forget_idle(self, now: float) -> None:
        while self._weights:
            first = next(iter(self._weights))
            if now - self._last[first] <= WINDOW:
                return
            self._weight -= self._weights.pop(first)
            self._cost -= self._recent.of(first)
            self._recent.forget(first)
            del self._last[first]
            if not self._weights:
                self._cost = self._weight = 0.0
