"""What each tenant of a class has had lately, and whether it asks for more than its share.

Who does leaves room to the others: it gets no place that would be one of the last few, so that they
find one free when they come. This is trunk reservation, which keeps a stream's blocking low for a
small part of the capacity (Kelly, "Loss Networks", The Annals of Applied Probability, 1991). Order
in the queue alone cannot do that: where one tenant takes all that is left, everybody waits until
somebody's answer ends.

What was refused for want of room counts as asked. By what it had alone, who floods a busy cluster
differs too little from who is ahead of its share by chance.

Who asks for more is found by two windows, both of which must say so: the long one tells a flood
from chance, the short one finds out within seconds that it is over (as alerts with two windows do:
Beyer et al., "The Site Reliability Workbook", 2018, chapter 5). The short one counts what arrives
and not what is served, because a line that has piled up is served long after its tenant has
stopped.
"""

from dataclasses import dataclass

from coordinator.core.estimates.recent_work import WINDOW_SECONDS, RecentWork

# seconds: a tenant at ten times its share that stops is taken for one that has stopped after 5 s
SHORT_WINDOW_SECONDS = 2.0
_SHARE_SLACK = 1.4  # of a share: chance makes tenants that ask for the same differ by less
_FULL_HEADROOM_SHARE = 1.25  # of a share: who has had so much leaves all that it is to leave


@dataclass(slots=True)
class _PendingCharge:
    """`charged_at`: when it was last charged."""

    weight: float = 1.0
    cost: float = 0.0
    placements: int = 0
    charged_at: float = 0.0


class TenantShares:
    """Of one class. A tenant counts for `WINDOW` seconds after it was last given anything. What is
    charged is put into the sums when somebody looks at them, because every token is charged."""

    def __init__(self) -> None:
        self._served = RecentWork()
        self._refused = RecentWork()
        self._placements = RecentWork()  # requests that were placed
        self._arrived = RecentWork(
            SHORT_WINDOW_SECONDS
        )  # what requests that came are expected to cost, refused ones included
        self._pending_charges: dict[str, _PendingCharge] = {}  # not in the sums yet
        self._weights: dict[
            str, float
        ] = {}  # of those that count: who was served longest ago is first
        self._last_charged_at: dict[str, float] = {}
        self._total_weight = 0.0  # of all of them

    def charge_tenant(
        self, tenant: str, weight: float, cost: float, now: float, *, turns: int = 0
    ) -> None:
        due = self._pending_charges.get(tenant)
        if due is None:
            due = self._pending_charges[tenant] = _PendingCharge()
        due.weight, due.charged_at = weight, now
        due.cost += cost
        due.placements += turns

    def record_arrivals(self, tenant: str, count: int, now: float) -> None:
        """So many requests have come. Each is taken for one like those that were placed."""
        self._settle_charges(now)
        turns = self._placements.get_work(tenant)
        if turns:
            self._arrived.add_work(tenant, count * self._served.get_work(tenant) / turns, now)

    def record_rejections(self, tenant: str, count: int, now: float) -> None:
        """So many requests have come and found no room. Each is taken for one like those that
        did."""
        self.record_arrivals(tenant, count, now)
        turns = self._placements.get_work(tenant)
        if turns:
            self._refused.add_work(tenant, count * self._served.get_work(tenant) / turns, now)

    def headroom_share(self, tenant: str, most: float, now: float) -> float:
        """What part of a node this tenant is to leave: none unless it asks for more than its share
        and has had that, then more and more, but no more than `most`, nor than what part the others
        have had."""
        self._settle_charges(now)
        if len(self._weights) < 2 or tenant not in self._weights:
            return 0.0
        fair = self._weights[tenant] / self._total_weight
        asked, all_asked = (
            self._served.get_work(tenant) + self._refused.get_work(tenant),
            self._served.total_work + self._refused.total_work,
        )
        arrived, all_arrived = self._arrived.get_work(tenant), self._arrived.total_work
        if asked <= _SHARE_SLACK * fair * all_asked or arrived <= _SHARE_SLACK * fair * all_arrived:
            return 0.0
        had = self._served.get_work(tenant) / self._served.total_work
        over = (had / fair - 1.0) / (_FULL_HEADROOM_SHARE - 1.0)
        return min(most, 1.0 - had) * min(1.0, max(0.0, over))

    def _settle_charges(self, now: float) -> None:
        """Forget who has not been served for long, and book what is due, as of when it was
        charged."""
        for each in (self._served, self._refused, self._placements, self._arrived):
            each.rescale(now)
        self._forget_before(now - WINDOW_SECONDS)
        if len(self._weights) == 1 and self._pending_charges.keys() - self._weights.keys():
            self._forget_tenant(*self._weights)  # what one had alone was nobody's loss
        for tenant, due in sorted(
            self._pending_charges.items(), key=lambda item: item[1].charged_at
        ):
            self._total_weight += due.weight - self._weights.pop(tenant, 0.0)
            self._weights[tenant], self._last_charged_at[tenant] = due.weight, due.charged_at
            self._served.add_work(tenant, due.cost, due.charged_at)
            self._placements.add_work(tenant, due.placements, due.charged_at)
        self._pending_charges.clear()
        self._forget_before(now - WINDOW_SECONDS)

    def _forget_before(self, then: float) -> None:
        while self._weights and self._last_charged_at[first := next(iter(self._weights))] < then:
            self._total_weight -= self._weights.pop(first)
            del self._last_charged_at[first]
            self._forget_tenant(first)
        if not self._weights:
            self._total_weight = 0.0

    def _forget_tenant(self, tenant: str) -> None:
        for each in (self._served, self._refused, self._placements, self._arrived):
            each.remove_key(tenant)
