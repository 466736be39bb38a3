"""Which split would have missed how many of the requests that came lately.

Every split is played through (`replay`) from where the cluster was when it was begun. One that has missed most of what
came in the last `ANEW` seconds is begun anew from where the present one is, as if it were chosen now: else the line
that it had by then would tell against it long after the load has turned.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from baton.ratio import Split
from baton.slo import Slo
from coordinator.core.forecast import Machine
from coordinator.core.replay import Replay
from coordinator.core.workload import Asked

LONG = 480.0  # seconds that are remembered
ANEW, MOST = 10.0, 0.6
NEAREST = 16  # splits around the present one that are played through
AT_ONCE = 512  # requests between two looks: of more, so many are taken, which bounds what a look costs


@dataclass(frozen=True, slots=True)
class _Row:
    at: float
    asked: int
    missed: dict[Split, int]


class Hindsight:
    def __init__(self, slo: Slo, now: float) -> None:
        self.until = now
        self._slo = slo
        self._replays: dict[Split, Replay] = {}
        self._anew: dict[Split, float] = {}
        self._rows: deque[_Row] = deque()

    def add(
        self,
        asked: Sequence[tuple[float, Asked]],
        computed: float,
        machine: Machine,
        splits: Sequence[Split],
        present: Split,
        now: float,
    ) -> None:
        """All that came since the last time. `splits` are those that may be, the present one among them."""
        near = sorted(splits, key=lambda split: abs(split.prefill - present.prefill))[:NEAREST]
        self._keep(near, present, machine)
        before = {split: replay.missed for split, replay in self._replays.items()}
        for replay in self._replays.values():
            replay.machine = machine
            for at, one in asked[-AT_ONCE:]:
                replay.ask(at, one, computed)
            replay.advance(now)
        missed = {split: replay.missed - before[split] for split, replay in self._replays.items()}
        self._rows.append(_Row(now, len(asked[-AT_ONCE:]), missed))
        self.until = now
        while self._rows[0].at <= now - LONG:
            self._rows.popleft()
        self._begin_anew(present, now)

    def asked(self, seconds: float) -> int:
        return sum(row.asked for row in self._rows if row.at > self.until - seconds)

    def missed(self, split: Split, seconds: float = LONG) -> int:
        """In the last `seconds`; of one that was not played through, as many as came."""
        rows = [row for row in self._rows if row.at > self.until - seconds]
        return sum(row.missed.get(split, row.asked) for row in rows)

    def saved(self, present: Split, other: Split) -> int:
        """Requests that `other` would have missed since the last time, and the present split would not."""
        missed = self._rows[-1].missed
        return missed.get(other, missed[present]) - missed[present]

    def move(self, present: Split, to: Split) -> None:
        """The cluster is about to be split so: what waits now will be served by that split."""
        self._replays[to] = self._replays[present].onto(to)

    def _keep(self, splits: Sequence[Split], present: Split, machine: Machine) -> None:
        new = Replay(present, machine, self._slo, self.until)
        origin = self._replays.get(present) or new
        self._replays = {
            split: self._replays.get(split) or (new if split == present else origin.onto(split)) for split in splits
        }

    def _begin_anew(self, present: Split, now: float) -> None:
        asked, least = self.asked(ANEW), self.missed(present, ANEW)
        for split in self._replays:
            missed = self.missed(split, ANEW)
            due = self._anew.get(split, 0.0) + ANEW <= now
            if due and split != present and asked and missed >= MOST * asked and missed > least:
                self._replays[split] = self._replays[present].onto(split)
                self._anew[split] = now
