"""Keeps an objective by changing the ratio, no more often than it must.

Every `LOOK` seconds a fast loop looks at what was asked in the last `FAST` seconds and a slow one at the last `SLOW`,
both also at what still waits from before:

    kept       the objective is met, as measured and as predicted             nothing is done
    gain       another split is predicted to serve `GAIN` more in both        else nothing is done: a swing is no trend
               windows, or `STRIKING` more in the fast one and no less in
               the slow one
    confirmed  so it was at the last look too, or at the last three as long   else at the next look
               as the objective is kept for most
    rested     `REST` seconds have passed since the last change was over,     else when they have
               `REVERSAL` for one in the other direction

Of splits that are about as good it takes the nearest. A change that is taken back within `SWING` seconds was a swing.
It doubles, for `MEMORY` seconds, the slow window and the rest before the next change back, and the split is chosen by
the slow window. So a load that swings comes to be seen as a whole, and gets the split that serves the whole best.

Demand is measured where requests arrive, so it does not depend on the split: a move does not move its own forecast.
Nodes on their way to a role count as having it, and while there are any nothing is decided.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.ratio import Split
from baton.slo import Slo
from coordinator.core.advisor import NEAR
from coordinator.core.forecast import Forecaster, Machine
from coordinator.core.workload import Asked, WorkloadMeter

LOOK = 5.0  # seconds
FAST, SLOW = 15.0, 30.0
ENOUGH = 20  # requests in the fast window
KEPT_SHARE, EXPECTED_SHARE = 0.95, 0.8  # of the requests, measured and predicted within the objective: it is kept
HURT_SHARE, LOOKS, CALM_LOOKS = 0.8, 2, 4  # looks that agree, if fewer were within it, and else
GAIN, STRIKING = 0.05, 0.25  # of the requests
REST, REVERSAL = 10.0, 20.0
SWING = 90.0  # a change that is taken back sooner was none that lasts
MEMORY, MOST_SWINGS = 1800.0, 4


@dataclass(frozen=True, slots=True)
class Sight:
    """The cluster at a look. `present`: nodes by the role that they have or are on their way to, which `moving` of them
    are. `waiting`: requests that are not placed, and when they came."""

    present: Split
    moving: int
    candidates: Sequence[Split]
    machine: Machine
    waiting: Sequence[tuple[float, Asked]] = ()


class Steering:
    def __init__(self, slo: Slo, now: float) -> None:
        self.slo = slo
        self.reason = "nothing was looked at yet"
        self.due = now + LOOK
        self._confirmed = 0  # direction of what the last look wanted
        self._looks = 0  # in a row that wanted that
        self._measured = 1.0
        self._over = now  # when the last change was, as far as it was seen
        self._direction = 0  # of the last change: 1 to more prefill nodes
        self._reversals: deque[float] = deque(maxlen=16)

    def rest(self, reason: str, now: float) -> None:
        """There is nothing to look at."""
        self.reason, self.due = reason, now + LOOK

    def look(self, sight: Sight, meter: WorkloadMeter, now: float) -> Split | None:
        """The ratio to be set now, if any; `reason` tells why, or why not."""
        self.due = now + LOOK
        wanted, self.reason = self._wanted(sight, meter, now)
        if wanted is None:
            self._confirmed = 0
            return None
        direction = _direction(sight.present, wanted)
        self._looks = self._looks + 1 if self._confirmed == direction else 1
        self._confirmed = direction
        if self._looks < (LOOKS if self._measured < HURT_SHARE else CALM_LOOKS):
            self.reason += ": to be confirmed at the next look"
            return None
        back = direction == -self._direction
        left = self._over + (REVERSAL * 2.0 ** self._swings(0, now) if back else REST) - now
        if left > 0.0:
            self.reason += f": {left:.0f} s of rest are left after the last change"
            return None
        if self._takes_back(direction, now):
            self._reversals.append(now)
        self._direction, self._over, self._confirmed = direction, now, 0
        return wanted

    def _wanted(self, sight: Sight, meter: WorkloadMeter, now: float) -> tuple[Split | None, str]:
        present = sight.present
        if sight.moving:
            self._over = now
            return None, f"{sight.moving} nodes are on their way to {present} and count as there"
        asked = meter.over(FAST, now, sight.waiting)
        if asked is None or len(asked.requests) < ENOUGH:
            count = len(asked.requests) if asked else 0
            return None, f"{count} requests in {FAST:g} s say too little"
        if present not in sight.candidates:
            return None, f"{present} has no node of one role"
        fast, self._measured = Forecaster(asked, sight.machine, self.slo), self._served(sight, meter, now)
        expected = fast.share(present)
        told = f"{expected:.0%} are predicted within {self.slo}, {self._measured:.0%} were"
        if self._measured >= KEPT_SHARE and expected >= EXPECTED_SHARE:
            return None, f"kept: {told}"
        shares = {split: fast.share(split) for split in fast.likely(sight.candidates)}
        better = {split: share for split, share in shares.items() if share >= expected + GAIN}
        if not better:
            return None, f"missed, and no split is predicted to do much better: {told}"
        swings = self._swings(_direction(present, max(better, key=lambda split: better[split])), now)
        window = SLOW * 2.0**swings
        past = meter.over(window, now, sight.waiting) or asked
        slow = Forecaster(past, sight.machine, self.slo)
        before = slow.share(present)
        able = {
            split: share
            for split in better
            if (share := slow.share(split)) >= before + GAIN
            or (share >= before - NEAR and better[split] >= expected + STRIKING)
        }
        if not able:
            return None, f"missed, and what came in {window:g} s would not have been served better: {told}"
        ranks = able if swings else {split: better[split] for split in able}
        best = _nearest(present, ranks)
        return best, f"missed: {told}; {better[best]:.0%} are predicted with {best}"

    def _served(self, sight: Sight, meter: WorkloadMeter, now: float) -> float:
        """The share within the objective of those who ended lately, and of those who have waited too long already."""
        service, ttft = meter.service(self.slo, FAST, now), self.slo.ttft
        late = sum(ttft is not None and now - at > ttft for at, _ in sight.waiting)
        return service.good / (service.ended + late) if service.ended + late else 1.0

    def _takes_back(self, direction: int, now: float) -> bool:
        return direction == -self._direction and now - self._over < SWING

    def _swings(self, direction: int, now: float) -> int:
        """Changes that were taken back lately, with the one that a change in this direction would be."""
        recent = sum(at > now - MEMORY for at in self._reversals)
        return min(recent + self._takes_back(direction, now), MOST_SWINGS)


def _direction(present: Split, wanted: Split) -> int:
    return 1 if wanted.prefill > present.prefill else -1


def _nearest(present: Split, shares: Mapping[Split, float]) -> Split:
    """Of those that are about as good as the best."""
    least = max(shares.values()) - NEAR
    return min(
        (split for split in shares if shares[split] >= least), key=lambda split: abs(split.prefill - present.prefill)
    )
