"""Replays recent requests on every split, and counts how many each would have missed.

It answers which split would have been best for the load that was, swings and bursts included. Which
one is best for the load that is measured now is answered by `split_forecast`, and the planner asks
both.

Every split is replayed (`SplitReplay`) from the state of the cluster when its replay began. A split
that has missed most requests of the last `RESTART_SECONDS` is restarted from the state of the
present one, as if it were chosen now: otherwise its backlog would count against it long after the
load has changed.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from baton.role_split import RoleSplit
from baton.slo import Slo
from coordinator.core.estimates.workload import RequestShape
from coordinator.core.ratio.split_forecast import NodeProfile
from coordinator.core.ratio.split_replay import SplitReplay

HISTORY_SECONDS = 480.0  # seconds that are remembered
RESTART_SECONDS, RESTART_MISS_SHARE = 10.0, 0.6
MAX_SPLITS = 16  # splits around the present one that are replayed, itself included
MAX_REQUESTS = 512  # requests of one interval that are replayed at most
MAX_REPLAYED = 1024  # requests times splits: with many requests, fewer splits are replayed
_MIN_SPLITS = 3  # the present split and one on each side


@dataclass(frozen=True, slots=True)
class _BacktestInterval:
    """What each split has missed between two evaluations."""

    ended_at: float
    request_count: int
    missed_by_split: dict[RoleSplit, int]


class SplitBacktest:
    """Counts how many of the recent requests each split would have served too late."""

    def __init__(self, slo: Slo, now: float) -> None:
        self.replayed_until = now
        self._slo = slo
        self._replays: dict[RoleSplit, SplitReplay] = {}
        self._restarted_at: dict[RoleSplit, float] = {}
        self._intervals: deque[_BacktestInterval] = deque()

    def add_requests(
        self,
        arrivals: Sequence[tuple[float, RequestShape]],
        computed: float,
        profile: NodeProfile,
        splits: Sequence[RoleSplit],
        present: RoleSplit,
        now: float,
    ) -> None:
        """Replay new requests; `splits` includes the present one."""
        nearest = sorted(splits, key=lambda split: abs(split.prefill_nodes - present.prefill_nodes))
        nearest = nearest[
            : max(_MIN_SPLITS, min(MAX_SPLITS, MAX_REPLAYED // max(1, len(arrivals))))
        ]
        self._select_splits(nearest, present, profile)
        before = {split: replay.missed_count for split, replay in self._replays.items()}
        for replay in self._replays.values():
            replay.profile = profile
            for arrival, shape in arrivals[-MAX_REQUESTS:]:
                replay.add_request(arrival, shape, computed)
            replay.advance_to(now)
        missed = {
            split: replay.missed_count - before[split] for split, replay in self._replays.items()
        }
        self._intervals.append(_BacktestInterval(now, len(arrivals[-MAX_REQUESTS:]), missed))
        self.replayed_until = now
        while self._intervals[0].ended_at <= now - HISTORY_SECONDS:
            self._intervals.popleft()
        self._restart_overloaded(present, now)

    def count_requests(self, seconds: float) -> int:
        return sum(
            row.request_count
            for row in self._intervals
            if row.ended_at > self.replayed_until - seconds
        )

    def count_missed(self, split: RoleSplit, seconds: float = HISTORY_SECONDS) -> int:
        """Return how many the split missed in the last `seconds`; all, if it was not replayed."""
        rows = [row for row in self._intervals if row.ended_at > self.replayed_until - seconds]
        return sum(row.missed_by_split.get(split, row.request_count) for row in rows)

    def count_saved(self, present: RoleSplit, other: RoleSplit) -> int:
        """Return how many requests of the last interval `other` would have missed and `present`
        not."""
        missed = self._intervals[-1].missed_by_split
        return missed.get(other, missed[present]) - missed[present]

    def on_split_changed(self, present: RoleSplit, to: RoleSplit) -> None:
        """The cluster changes to split `to`, which will serve the requests that wait now."""
        self._replays[to] = self._replays[present].with_split(to)

    def _select_splits(
        self, splits: Sequence[RoleSplit], present: RoleSplit, profile: NodeProfile
    ) -> None:
        new = SplitReplay(present, profile, self._slo, self.replayed_until)
        origin = self._replays.get(present) or new
        self._replays = {
            split: self._replays.get(split)
            or (new if split == present else origin.with_split(split))
            for split in splits
        }

    def _restart_overloaded(self, present: RoleSplit, now: float) -> None:
        arrivals, present_missed = (
            self.count_requests(RESTART_SECONDS),
            self.count_missed(present, RESTART_SECONDS),
        )
        for split in self._replays:
            missed = self.count_missed(split, RESTART_SECONDS)
            due = self._restarted_at.get(split, 0.0) + RESTART_SECONDS <= now
            if (
                due
                and split != present
                and arrivals
                and missed >= RESTART_MISS_SHARE * arrivals
                and missed > present_missed
            ):
                self._replays[split] = self._replays[present].with_split(split)
                self._restarted_at[split] = now
