"""Eight nodes as `SplitReplay` models them, with the ratio planner, on a virtual clock.

It knows which requests are late and how long nodes are away while they switch, and uses nothing
of the brain, so that minutes cost a tenth of a second. It shows when following a load pays;
test_auto_ratio_simulated.py uses the real brain."""

import math
from collections.abc import Sequence

from baton.online_fit import OnlineLinearFit
from baton.role_split import RoleSplit
from benchmarks.scenarios.ratio_workloads import (
    NODE_COUNT,
    SEQUENCES_PER_NODE,
    SLO,
    OfferedLoad,
    plan_phases,
)
from coordinator.core.estimates.cost_model import NodeCosts
from coordinator.core.estimates.workload import RequestShape, StageSeconds, WorkloadMeter
from coordinator.core.ratio.planner import ClusterSnapshot, RatioPlanner
from coordinator.core.ratio.split_forecast import NodeProfile
from coordinator.core.ratio.split_replay import SplitReplay

# 2 ms for each prompt token; a step takes 40 ms, and 2 ms for each sequence: those of the paced
# nodes of `ratio`
NODE_PROFILE = NodeProfile(
    NodeCosts(OnlineLinearFit((0.0, 2.048, 0.0)), OnlineLinearFit((0.04, 0.002, 0.0))),
    SEQUENCES_PER_NODE,
    65536,
    (0.01, 0.0),
)
SPLITS = [RoleSplit(prefill, NODE_COUNT - prefill) for prefill in range(1, NODE_COUNT)]
SWITCH_SECONDS = {
    True: 7.0,
    False: 3.0,
}  # seconds until decode nodes, and until prefill nodes, have what they do behind them
_AFTER = 15.0

LoadPhases = Sequence[tuple[OfferedLoad, float]]


class PlannedCluster:
    """Counts requests and missed ones, and records changes of the ratio. Without `automatic` the
    split stays."""

    def __init__(
        self, loads: LoadPhases, split: RoleSplit, *, automatic: bool, seed: str = "steered"
    ) -> None:
        self.split = split
        self.ratio_changes: list[tuple[float, RoleSplit]] = []
        self.missed_history: list[tuple[float, int]] = []  # requests missed in all, at each look
        self._plan = plan_phases(loads, seed)
        self.request_count = len(self._plan)
        self._meter = WorkloadMeter()
        self._planner = RatioPlanner(SLO, 0.0)
        self._is_automatic = automatic
        self._replay = SplitReplay(split, NODE_PROFILE, SLO, 0.0)
        self._switching: list[tuple[float, RoleSplit]] = []
        self._reported_missed = self._arrivals = 0
        self._run(sum(seconds for _, seconds in loads) + _AFTER)

    @property
    def missed_count(self) -> int:
        return self._replay.missed_count

    @property
    def attainment(self) -> float:
        return 1.0 - self.missed_count / self.request_count

    def count_missed_after(self, moment: float) -> int:
        """Return the number of requests missed from that moment on."""
        return self.missed_count - next(
            missed for at, missed in reversed(self.missed_history) if at <= moment
        )

    def _run(self, end: float) -> None:
        coming = iter(self._plan)
        ask = next(coming, None)
        now = 0.0
        while now < end:
            arrival = ask.start_seconds if ask is not None else math.inf
            switch = self._switching[0][0] if self._switching else math.inf
            now = min(arrival, switch, self._planner.next_evaluation_at)
            if now == switch:
                self._replay.advance_to(now)
                self._replay = self._replay.with_split(self._switching.pop(0)[1])
            elif ask is not None and now == arrival:
                one = RequestShape(ask.prompt_tokens, float(ask.output_tokens))
                self._replay.add_request(now, one, 1.0)
                self._meter.record_arrival(one.prompt_tokens, one.output_tokens, now)
                self._arrivals += 1
                ask = next(coming, None)
            else:
                self._evaluate(now)

    def _evaluate(self, now: float) -> None:
        self._replay.advance_to(now)
        late = self.missed_count - self._reported_missed
        for number in range(max(self._arrivals, late)):
            self._meter.record_end(math.inf if number < late else 0.1, 0.01, StageSeconds(), now)
        self._reported_missed, self._arrivals = self.missed_count, 0
        self.missed_history.append((now, self.missed_count))
        if not self._is_automatic:
            self._planner.skip_evaluation("left alone", now)
            return
        waiting = [
            (one.arrival, RequestShape(int(500 * one.prefill_seconds), one.decode_steps + 1))
            for _, _, one in self._replay._queue
        ]
        sight = ClusterSnapshot(self.split, len(self._switching), SPLITS, NODE_PROFILE, waiting)
        wanted = self._planner.choose_split(sight, self._meter, now)
        if wanted is None:
            return
        self.ratio_changes.append((now, wanted))
        both = RoleSplit(
            min(self.split.prefill_nodes, wanted.prefill_nodes),
            min(self.split.decode_nodes, wanted.decode_nodes),
        )
        there = now + SWITCH_SECONDS[wanted.prefill_nodes > self.split.prefill_nodes]
        self._switching = [(now + 1e-3, both), (there, wanted)]
        self.split = wanted
