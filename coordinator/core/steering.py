"""Keeps an objective by changing the ratio, no more often than it must.

Every `LOOK` seconds, a fast loop over what was asked in the last `FAST` seconds and a slow one over the last `SLOW`:

    keeps      the objective is met, as measured and as predicted             nothing is done
    gain       another split is predicted to serve `GAIN` more of it          else nothing is done
    floor      and no less of what came in the slow window                    else nothing is done: a swing is no trend
    confirmed  so it was at the last look too                                 else at the next look
    rested     `REST` seconds have passed since the last change was over,     else when they have
               for one in the other direction `REVERSAL`, twice as long with
               each one of the last `MEMORY` seconds

Demand is measured where requests arrive, so it does not depend on the split: a move does not move its own forecast.
Nodes on their way to a role count as having it, and while there are any nothing is decided.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from baton.ratio import Split
from baton.slo import Slo
from coordinator.core.advisor import NEAR, choose
from coordinator.core.forecast import Forecaster, Machine
from coordinator.core.workload import WorkloadMeter

LOOK = 5.0  # seconds
FAST, SLOW = 15.0, 60.0
ENOUGH = 20  # requests in the fast window
KEPT_SHARE = 0.95  # of the requests within the objective: it is kept
GAIN = 0.05  # of the requests
REST, REVERSAL = 10.0, 60.0
LONGEST_REST, MEMORY = 960.0, 1800.0


@dataclass(frozen=True, slots=True)
class Sight:
    """The cluster at a look. `present`: nodes by the role that they have or are on their way to, which `moving` of them
    are."""

    present: Split
    moving: int
    candidates: Sequence[Split]
    machine: Machine


class Steering:
    def __init__(self, slo: Slo, now: float) -> None:
        self.slo = slo
        self.reason = "nothing was looked at yet"
        self.due = now + LOOK
        self._confirmed: Split | None = None
        self._over = now  # when the last change was, as far as it was seen
        self._direction = 0
        self._reversals: deque[float] = deque(maxlen=16)

    def rest(self, reason: str, now: float) -> None:
        """There is nothing to look at."""
        self.reason, self.due = reason, now + LOOK

    def look(self, sight: Sight, meter: WorkloadMeter, now: float) -> Split | None:
        """The ratio to be set now, if any; `reason` tells why, or why not."""
        self.due = now + LOOK
        wanted, self.reason = self._wanted(sight, meter, now)
        if wanted is None:
            self._confirmed = None
            return None
        direction = 1 if wanted.prefill > sight.present.prefill else -1
        seen, self._confirmed = self._confirmed, wanted
        if seen is None or (seen.prefill > sight.present.prefill) != (direction > 0):
            self.reason += ": to be confirmed at the next look"
            return None
        left = self._over + self._rest(direction, now) - now
        if left > 0.0:
            self.reason += f": {left:.0f} s of rest are left after the last change"
            return None
        if direction == -self._direction:
            self._reversals.append(now)
        self._direction, self._over, self._confirmed = direction, now, None
        return wanted

    def _wanted(self, sight: Sight, meter: WorkloadMeter, now: float) -> tuple[Split | None, str]:
        present = sight.present
        if sight.moving:
            self._over = now
            return None, f"{sight.moving} nodes are on their way to {present} and count as there"
        fast, slow = meter.over(FAST, now), meter.over(SLOW, now)
        if fast is None or slow is None or len(fast.requests) < ENOUGH:
            count = len(fast.requests) if fast else 0
            return None, f"{count} requests in {FAST:g} s say too little"
        if present not in sight.candidates:
            return None, f"{present} has no node of one role"
        forecaster, measured = Forecaster(fast, sight.machine, self.slo), meter.service(self.slo, FAST, now).share
        expected = forecaster.share(present)
        told = f"{expected:.0%} are predicted within {self.slo}"
        told += "" if measured is None else f", {measured:.0%} were"
        if min(expected, 1.0 if measured is None else measured) >= KEPT_SHARE:
            return None, f"kept: {told}"
        long_run = Forecaster(slow, sight.machine, self.slo)
        floor = long_run.share(present) - NEAR
        able = [split for split in sight.candidates if split == present or long_run.share(split) >= floor]
        best, share = choose(forecaster, able, present)
        if best == present or share < expected + GAIN:
            held = "" if len(able) == len(sight.candidates) else f" that the last {SLOW:g} s allow"
            return None, f"missed, and no split{held} is predicted to do much better: {told}"
        return best, f"missed: {told}; {share:.0%} are predicted with {best}"

    def _rest(self, direction: int, now: float) -> float:
        if direction != -self._direction:
            return REST
        recent = sum(at > now - MEMORY for at in self._reversals)
        return min(REVERSAL * 2.0**recent, LONGEST_REST)
