"""What each tenant of a class has had lately, and whether it asks for more than its share.

Who does leaves room to the others: it gets no place that would be one of the last few, so that they find one free when
they come. This is trunk reservation, which keeps a stream's blocking low for a small part of the capacity (Kelly, "Loss
Networks", The Annals of Applied Probability, 1991). Order in the queue alone cannot do that: where one tenant takes all
that is left, everybody waits until somebody's answer ends.

What was refused for want of room counts as asked. By what it had alone, who floods a busy cluster differs too little
from who is ahead of its share by chance.

Who asks for more is found by two windows, both of which must say so: the long one tells a flood from chance, the short
one finds out within seconds that it is over (as alerts with two windows do: Beyer et al., "The Site Reliability
Workbook", 2018, chapter 5). The short one counts what arrives and not what is served, because a line that has piled up
is served long after its tenant has stopped.
"""

from dataclasses import dataclass

from coordinator.core.recent_work import WINDOW, RecentWork

SHORT_WINDOW = 2.0  # seconds: a tenant at ten times its share that stops is taken for one that has stopped after 5 s
_SLACK = 1.4  # of a share: chance makes tenants that ask for the same differ by less
_FULL = 1.25  # of a share: who has had so much leaves all that it is to leave


@dataclass(slots=True)
class _Due:
    """`at`: when it was last charged."""

    weight: float = 1.0
    cost: float = 0.0
    turns: int = 0
    at: float = 0.0


class Shares:
    """Of one class. A tenant counts for `WINDOW` seconds after it was last given anything. What is charged is put into
    the sums when somebody looks at them, because every token is charged."""

    def __init__(self) -> None:
        self._had = RecentWork()
        self._refused = RecentWork()
        self._turns = RecentWork()  # requests that were placed
        self._arrived = RecentWork(SHORT_WINDOW)  # what requests that came are expected to cost, refused ones included
        self._due: dict[str, _Due] = {}  # not in the sums yet
        self._weights: dict[str, float] = {}  # of those that count: who was served longest ago is first
        self._last: dict[str, float] = {}
        self._weight = 0.0  # of all of them

    def charge(self, tenant: str, weight: float, cost: float, now: float, *, turns: int = 0) -> None:
        due = self._due.get(tenant)
        if due is None:
            due = self._due[tenant] = _Due()
        due.weight, due.at = weight, now
        due.cost += cost
        due.turns += turns

    def asked(self, tenant: str, count: int, now: float) -> None:
        """So many requests have come. Each is taken for one like those that were placed."""
        self._look(now)
        turns = self._turns.of(tenant)
        if turns:
            self._arrived.add(tenant, count * self._had.of(tenant) / turns, now)

    def refused(self, tenant: str, count: int, now: float) -> None:
        """So many requests have come and found no room. Each is taken for one like those that did."""
        self.asked(tenant, count, now)
        turns = self._turns.of(tenant)
        if turns:
            self._refused.add(tenant, count * self._had.of(tenant) / turns, now)

    def headroom(self, tenant: str, most: float, now: float) -> float:
        """What part of a node this tenant is to leave: none unless it asks for more than its share and has had that,
        then more and more, but no more than `most`, nor than what part the others have had."""
        self._look(now)
        if len(self._weights) < 2 or tenant not in self._weights:
            return 0.0
        fair = self._weights[tenant] / self._weight
        asked, all_asked = self._had.of(tenant) + self._refused.of(tenant), self._had.total + self._refused.total
        arrived, all_arrived = self._arrived.of(tenant), self._arrived.total
        if asked <= _SLACK * fair * all_asked or arrived <= _SLACK * fair * all_arrived:
            return 0.0
        had = self._had.of(tenant) / self._had.total
        over = (had / fair - 1.0) / (_FULL - 1.0)
        return min(most, 1.0 - had) * min(1.0, max(0.0, over))

    def _look(self, now: float) -> None:
        """Forget who has not been served for long, and book what is due, as of when it was charged."""
        for each in (self._had, self._refused, self._turns, self._arrived):
            each.keep_scale(now)
        self._forget_before(now - WINDOW)
        if len(self._weights) == 1 and self._due.keys() - self._weights.keys():
            self._forget(*self._weights)  # what one had alone was nobody's loss
        for tenant, due in sorted(self._due.items(), key=lambda item: item[1].at):
            self._weight += due.weight - self._weights.pop(tenant, 0.0)
            self._weights[tenant], self._last[tenant] = due.weight, due.at
            self._had.add(tenant, due.cost, due.at)
            self._turns.add(tenant, due.turns, due.at)
        self._due.clear()
        self._forget_before(now - WINDOW)

    def _forget_before(self, then: float) -> None:
        while self._weights and self._last[first := next(iter(self._weights))] < then:
            self._weight -= self._weights.pop(first)
            del self._last[first]
            self._forget(first)
        if not self._weights:
            self._weight = 0.0

    def _forget(self, tenant: str) -> None:
        for each in (self._had, self._refused, self._turns, self._arrived):
            each.forget(tenant)
