"""Keeps an objective by changing the ratio, no more often than that pays.

Every `LOOK` seconds it looks at what was asked in the last `FAST` seconds, with what still waits (`forecast`), and at
what every split would have made of what came before (`hindsight`). It changes the ratio if the objective is missed,
another split is predicted to keep it for `GAIN` more of the requests, and one of these holds:

    proved    in the last `LONG` seconds that split would have missed fewer requests than the present one, by the price
              of a change: it serves the whole better, whatever the load is just now
    a bet     in the last `EVIDENCE` seconds it would have; or the forecast says so at `LOOKS` looks in a row and that
              nothing else is left, since hardly any request is predicted to be in time as it is. This bets that the
              load stays as it is now

The *price* of a change is the requests that come in `PRICE[0]` seconds, and `PRICE[1]` more for all nodes that change
their role. A bet that is taken back has paid if its split missed fewer requests than the one before would have
meanwhile, by the price of both ways. If it has not, the load swings faster than it is worth following: no other bet is
made for `PAUSE` seconds, twice as long each time that happens again, until one pays. So phases that last are followed,
and a load that swings comes to be served by the split that serves the whole best.

Following with a price is a metrical task system (Borodin, Linial, Saks: "An optimal on-line algorithm for metrical task
system", J. ACM 1992): who moves once as much was lost as the move costs loses little against one who knows the future.
The pauses are for loads that swing just as fast as makes such a follower lose most.

Demand is measured where requests arrive, so it does not depend on the split: a move does not move its own forecast.
Nodes on their way to a role count as having it, and while there are any nothing is decided.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.ratio import Split
from baton.slo import Slo
from coordinator.core.advisor import NEAR
from coordinator.core.forecast import Forecaster, Machine
from coordinator.core.hindsight import LONG, Hindsight
from coordinator.core.workload import Asked, WorkloadMeter

LOOK = 2.5  # seconds
FAST, EVIDENCE = 15.0, 30.0
ENOUGH = 20  # requests in the fast window
KEPT_SHARE, EXPECTED_SHARE = 0.95, 0.8  # of the requests, measured and predicted within the objective: it is kept
GAIN = 0.05  # of the requests
LOOKS = 2  # that agree
HOPELESS, STRIKING = 0.05, 0.5  # of the requests: predicted as it is, and gained
PRICE = 5.0, 20.0  # seconds of what comes
REST = 10.0  # after a change
PAUSE, MOST_DOUBLINGS = 480.0, 3


@dataclass(frozen=True, slots=True)
class Sight:
    """The cluster at a look. `present`: nodes by the role that they have or are on their way to, which `moving` of them
    are. `waiting`: requests that are not placed, and when they came."""

    present: Split
    moving: int
    candidates: Sequence[Split]
    machine: Machine
    waiting: Sequence[tuple[float, Asked]] = ()


@dataclass(slots=True)
class _Bet:
    """`saved`: requests that the split before, `source`, would have missed. `price`: of going there and back."""

    source: Split
    price: float = 0.0
    saved: int = 0


class Steering:
    def __init__(self, slo: Slo, now: float) -> None:
        self.slo = slo
        self.reason = "nothing was looked at yet"
        self.due = now + LOOK
        self._hindsight = Hindsight(slo, now)
        self._rested = now  # when the last change is over, and REST
        self._proved = 0  # looks in a row
        self._hopeless = 0
        self._bet: _Bet | None = None
        self._lost = 0  # bets in a row
        self._paused = now  # until when no bet is made

    def rest(self, reason: str, now: float) -> None:
        """There is nothing to look at."""
        self.reason, self.due = reason, now + LOOK

    def look(self, sight: Sight, meter: WorkloadMeter, now: float) -> Split | None:
        """The ratio to be set now, if any; `reason` tells why, or why not."""
        self.due = now + LOOK
        present = sight.present
        if present not in sight.candidates:
            self.reason = f"{present} has no node of one role"
            return None
        asked = meter.since(self._hindsight.until)
        self._hindsight.add(asked, meter.computed, sight.machine, sight.candidates, present, now)
        if self._bet is not None:
            self._bet.saved += self._hindsight.saved(present, self._bet.source)
        wanted, self.reason = self._wanted(sight, meter, now)
        if wanted is not None:
            self._rested, self._proved, self._hopeless = now + REST, 0, 0
            self._hindsight.move(present, wanted)
        return wanted

    def _wanted(self, sight: Sight, meter: WorkloadMeter, now: float) -> tuple[Split | None, str]:
        present = sight.present
        if sight.moving:
            self._rested = now + REST
            return None, f"{sight.moving} nodes are on their way to {present} and count as there"
        asked = meter.over(FAST, now, sight.waiting)
        if asked is None or len(asked.requests) < ENOUGH:
            count = len(asked.requests) if asked else 0
            return None, f"{count} requests in {FAST:g} s say too little"
        forecaster, measured = Forecaster(asked, sight.machine, self.slo), self._measured(sight, meter, now)
        expected = forecaster.share(present)
        told = f"{expected:.0%} are predicted within {self.slo}, {measured:.0%} were"
        if measured >= KEPT_SHARE and expected >= EXPECTED_SHARE:
            self._proved = self._hopeless = 0
            return None, f"kept: {told}"
        shares = {split: forecaster.share(split) for split in forecaster.likely(sight.candidates)}
        better = {split: share for split, share in shares.items() if share >= expected + GAIN}
        if not better:
            return None, f"missed, and no split is predicted to do much better: {told}"
        hopeless = expected < HOPELESS and measured < KEPT_SHARE
        self._hopeless = self._hopeless + 1 if hopeless else 0
        return self._choose(present, expected, better, told, now)

    def _choose(
        self, present: Split, expected: float, better: Mapping[Split, float], told: str, now: float
    ) -> tuple[Split | None, str]:
        proved = [split for split in better if self._would_save(present, split, LONG)]
        self._proved = self._proved + 1 if proved else 0
        if proved and self._proved < LOOKS:
            return None, f"missed: {told}: to be confirmed at the next look"
        able = proved or [
            split
            for split, share in better.items()
            if self._would_save(present, split, EVIDENCE)
            or (self._hopeless >= LOOKS and share >= expected + STRIKING and self._no_worse(present, split))
        ]
        if not able:
            return None, f"missed, and what came in {EVIDENCE:g} s says no change would have paid yet: {told}"
        if not proved and now < self._paused:
            left = self._paused - now
            return None, f"missed: {told}: the load swings, and is not followed for {left:.0f} s"
        if now < self._rested:
            return None, f"missed: {told}: {self._rested - now:.0f} s of rest are left after the last change"
        if not proved and self._hopeless:
            best = _nearest(present, {split: better[split] for split in able})
        else:
            window = LONG if proved else EVIDENCE
            best = min(able, key=lambda split: self._cost(present, split, window))
        self._settle(present, best, now)
        if not proved:
            self._bet = self._bet or _Bet(present)
            self._bet.price += 2.0 * self._price(present, best)
        return best, f"missed: {told}; {better[best]:.0%} are predicted with {best}"

    def _settle(self, present: Split, to: Split, now: float) -> None:
        """A change towards where a bet came from ends it."""
        bet = self._bet
        if bet is None or (bet.source.prefill - present.prefill) * (to.prefill - present.prefill) <= 0:
            return
        if bet.saved >= bet.price:
            self._lost = 0
        else:
            self._paused = now + PAUSE * 2.0**self._lost
            self._lost = min(self._lost + 1, MOST_DOUBLINGS)
        self._bet = None

    def _would_save(self, present: Split, other: Split, seconds: float) -> bool:
        return self._cost(present, other, seconds) <= self._hindsight.missed(present, seconds)

    def _no_worse(self, present: Split, other: Split) -> bool:
        return self._hindsight.missed(other, EVIDENCE) <= self._hindsight.missed(present, EVIDENCE)

    def _cost(self, present: Split, other: Split, seconds: float) -> float:
        """Requests that `other` would have missed, with the price of the change to it."""
        return self._hindsight.missed(other, seconds) + self._price(present, other)

    def _price(self, present: Split, other: Split) -> float:
        """In requests."""
        fixed, all_nodes = PRICE
        nodes = abs(other.prefill - present.prefill) / present.nodes
        return self._hindsight.asked(EVIDENCE) / EVIDENCE * (fixed + all_nodes * nodes)

    def _measured(self, sight: Sight, meter: WorkloadMeter, now: float) -> float:
        """The share within the objective of those who ended lately, and of those who have waited too long already."""
        service, ttft = meter.service(self.slo, FAST, now), self.slo.ttft
        late = sum(ttft is not None and now - at > ttft for at, _ in sight.waiting)
        return service.good / (service.ended + late) if service.ended + late else 1.0


def _nearest(present: Split, shares: Mapping[Split, float]) -> Split:
    """Of those that are about as good as the best."""
    least = max(shares.values()) - NEAR
    return min(
        (split for split in shares if shares[split] >= least), key=lambda split: abs(split.prefill - present.prefill)
    )
