"""Changes the ratio to keep an SLO, no more often than that pays.

Every `EVALUATION_PERIOD` seconds the planner looks at the demand of the last `DEMAND_WINDOW`
seconds with what is still queued (`split_forecast`), and at how each split would have served
earlier requests (`backtest`). It changes the ratio if the SLO is missed, another split is predicted
to keep it for `MIN_GAIN` more of the requests, and one of these holds:

    proven    over `HISTORY_SECONDS` that split would have missed fewer requests than the present
              one, by at least the switching cost: it serves the whole history better
    trial     it would have over the last `EVIDENCE_WINDOW` seconds; or the forecast says at
              `CONFIRMATIONS` evaluations in a row that hardly any request will be in time with the
              present split. A trial assumes that the load stays as it is now

The switching cost is the requests of `SWITCHING_COST_SECONDS[0]` seconds, plus those of
`SWITCHING_COST_SECONDS[1]` seconds times the share of nodes that switch. A trial that is reverted
has paid if its split missed fewer requests than the previous one would have, by the cost of both
switches. If not, the load swings faster than following it pays: trials pause for
`TRIAL_PAUSE_SECONDS`, doubled each time, until one pays. So lasting phases are followed, and a load
that swings is served by the split that serves the whole best.

Following at a cost is a metrical task system (Borodin, Linial, Saks: "An optimal on-line algorithm
for metrical task system", J. ACM 1992): switching once the losses equal the switching cost loses
little against knowing the future. The pauses are for loads that swing at the worst rate for that.

Demand is measured where requests arrive, so it does not depend on the split, and a switch does not
change its own forecast. Nodes that are switching count in their new role, and while there are any
nothing is decided.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.role_split import RoleSplit
from baton.slo import Slo
from coordinator.core.estimates.workload import RequestShape, WorkloadMeter
from coordinator.core.ratio.advisor import EQUAL_ATTAINMENT
from coordinator.core.ratio.backtest import HISTORY_SECONDS, SplitBacktest
from coordinator.core.ratio.split_forecast import NodeProfile, SplitForecaster

EVALUATION_PERIOD = 2.5  # seconds
DEMAND_WINDOW, EVIDENCE_WINDOW = 15.0, 30.0  # seconds
MIN_REQUESTS = 20  # in the demand window
# shares of requests, measured and predicted within the SLO, from which on it counts as kept
MIN_MEASURED_ATTAINMENT, MIN_PREDICTED_ATTAINMENT = 0.95, 0.8
MIN_GAIN = 0.05  # share of requests that another split must serve better
CONFIRMATIONS = 2  # evaluations in a row that agree
# shares of requests: predicted within the SLO with the present split, and gained by another
HOPELESS_ATTAINMENT, STRIKING_GAIN = 0.05, 0.5
SWITCHING_COST_SECONDS = 5.0, 20.0  # seconds of what comes
COOLDOWN_SECONDS = 10.0  # after a change
TRIAL_PAUSE_SECONDS, MAX_PAUSE_DOUBLINGS = 480.0, 3


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """What an evaluation knows of the cluster."""

    current_split: RoleSplit  # nodes by the role that they have or are switching to
    switching_nodes: int  # of these, nodes that are switching
    candidate_splits: Sequence[RoleSplit]
    node_profile: NodeProfile
    # Arrival time in seconds, and shape, of each request that waits.
    queued_requests: Sequence[tuple[float, RequestShape]] = ()


@dataclass(slots=True)
class _TrialSplit:
    """A change of split on probation, until it is reverted."""

    previous_split: RoleSplit
    switching_cost: float = 0.0  # requests, of switching there and back
    requests_saved: int = 0  # requests that the previous split would have missed


class RatioPlanner:
    """Decides which split to have; `reason` explains the last decision."""

    def __init__(self, slo: Slo, now: float) -> None:
        self.target_slo = slo
        self.reason = "not evaluated yet"
        self.next_evaluation_at = now + EVALUATION_PERIOD
        self._backtest = SplitBacktest(slo, now)
        self._cooldown_until = now  # after the last change
        self._proven_streak = 0  # evaluations in a row
        self._hopeless_streak = 0
        self._trial: _TrialSplit | None = None
        self._failed_trials = 0  # trials in a row
        self._trials_paused_until = now

    def skip_evaluation(self, reason: str, now: float) -> None:
        """Note why there is nothing to evaluate, and set the time of the next evaluation."""
        self.reason, self.next_evaluation_at = reason, now + EVALUATION_PERIOD

    def choose_split(
        self, snapshot: ClusterSnapshot, meter: WorkloadMeter, now: float
    ) -> RoleSplit | None:
        """Return the split to change to now, or None; `reason` says why."""
        self.next_evaluation_at = now + EVALUATION_PERIOD
        present = snapshot.current_split
        if present not in snapshot.candidate_splits:
            self.reason = f"{present} has no node of one role"
            return None
        arrived = meter.list_arrivals_since(self._backtest.replayed_until)
        self._backtest.add_requests(
            arrived,
            meter.computed_share,
            snapshot.node_profile,
            snapshot.candidate_splits,
            present,
            now,
        )
        if self._trial is not None:
            self._trial.requests_saved += self._backtest.count_saved(
                present, self._trial.previous_split
            )
        split, self.reason = self._evaluate(snapshot, meter, now)
        if split is not None:
            self._cooldown_until, self._proven_streak, self._hopeless_streak = (
                now + COOLDOWN_SECONDS,
                0,
                0,
            )
            self._backtest.on_split_changed(present, split)
        return split

    def _evaluate(
        self, snapshot: ClusterSnapshot, meter: WorkloadMeter, now: float
    ) -> tuple[RoleSplit | None, str]:
        present = snapshot.current_split
        if snapshot.switching_nodes:
            self._cooldown_until = now + COOLDOWN_SECONDS
            return (
                None,
                f"{snapshot.switching_nodes} nodes are on their way to {present} and count as"
                " there",
            )
        workload = meter.summarize_workload(DEMAND_WINDOW, now, snapshot.queued_requests)
        if workload is None or len(workload.requests) < MIN_REQUESTS:
            count = len(workload.requests) if workload else 0
            return None, f"{count} requests in {DEMAND_WINDOW:g} s say too little"
        forecaster, measured = (
            SplitForecaster(workload, snapshot.node_profile, self.target_slo),
            self._measured_attainment(snapshot, meter, now),
        )
        expected = forecaster.compute_attainment(present)
        summary = f"{expected:.0%} are predicted within {self.target_slo}, {measured:.0%} were"
        if measured >= MIN_MEASURED_ATTAINMENT and expected >= MIN_PREDICTED_ATTAINMENT:
            self._proven_streak = self._hopeless_streak = 0
            return None, f"kept: {summary}"
        shares = {
            split: forecaster.compute_attainment(split)
            for split in forecaster.list_least_loaded(snapshot.candidate_splits)
        }
        better = {split: share for split, share in shares.items() if share >= expected + MIN_GAIN}
        if not better:
            return None, f"missed, and no split is predicted to do much better: {summary}"
        hopeless = expected < HOPELESS_ATTAINMENT and measured < MIN_MEASURED_ATTAINMENT
        self._hopeless_streak = self._hopeless_streak + 1 if hopeless else 0
        return self._select_better(present, expected, better, summary, now)

    def _select_better(
        self,
        present: RoleSplit,
        expected: float,
        better: Mapping[RoleSplit, float],
        summary: str,
        now: float,
    ) -> tuple[RoleSplit | None, str]:
        proven = [split for split in better if self._pays_off(present, split, HISTORY_SECONDS)]
        self._proven_streak = self._proven_streak + 1 if proven else 0
        if proven and self._proven_streak < CONFIRMATIONS:
            return None, f"missed: {summary}: to be confirmed at the next evaluation"
        eligible = proven or self._list_trial_splits(present, expected, better)
        if not eligible:
            return (
                None,
                f"missed, and what came in {EVIDENCE_WINDOW:g} s says no change would have paid"
                f" yet: {summary}",
            )
        if not proven and now < self._trials_paused_until:
            left = self._trials_paused_until - now
            return None, f"missed: {summary}: the load swings, and is not followed for {left:.0f} s"
        if now < self._cooldown_until:
            return (
                None,
                f"missed: {summary}: {self._cooldown_until - now:.0f} s of rest are left after the"
                " last change",
            )
        if not proven and self._hopeless_streak:
            best = _nearest_good_split(present, {split: better[split] for split in eligible})
        else:
            window = HISTORY_SECONDS if proven else EVIDENCE_WINDOW
            best = min(
                eligible,
                key=lambda split: self._missed_with_switching_cost(present, split, window),
            )
        self._settle_trial(present, best, now)
        if not proven:
            self._extend_trial(present, best)
        return best, f"missed: {summary}; {better[best]:.0%} are predicted with {best}"

    def _extend_trial(self, present: RoleSplit, to: RoleSplit) -> None:
        self._trial = self._trial or _TrialSplit(present)
        self._trial.switching_cost += 2.0 * self._switching_cost(present, to)

    def _list_trial_splits(
        self, present: RoleSplit, expected: float, better: Mapping[RoleSplit, float]
    ) -> list[RoleSplit]:
        """Return the splits that may be tried although the whole history does not prove them."""
        return [
            split
            for split, share in better.items()
            if self._pays_off(present, split, EVIDENCE_WINDOW)
            or (
                self._hopeless_streak >= CONFIRMATIONS
                and share >= expected + STRIKING_GAIN
                and self._is_no_worse(present, split)
            )
        ]

    def _settle_trial(self, present: RoleSplit, to: RoleSplit, now: float) -> None:
        """End the trial if this change goes back towards the split before it."""
        trial = self._trial
        if (
            trial is None
            or (trial.previous_split.prefill_nodes - present.prefill_nodes)
            * (to.prefill_nodes - present.prefill_nodes)
            <= 0
        ):
            return
        if trial.requests_saved >= trial.switching_cost:
            self._failed_trials = 0
        else:
            self._trials_paused_until = now + TRIAL_PAUSE_SECONDS * 2.0**self._failed_trials
            self._failed_trials = min(self._failed_trials + 1, MAX_PAUSE_DOUBLINGS)
        self._trial = None

    def _pays_off(self, present: RoleSplit, other: RoleSplit, seconds: float) -> bool:
        return self._missed_with_switching_cost(
            present, other, seconds
        ) <= self._backtest.count_missed(present, seconds)

    def _is_no_worse(self, present: RoleSplit, other: RoleSplit) -> bool:
        return self._backtest.count_missed(other, EVIDENCE_WINDOW) <= self._backtest.count_missed(
            present, EVIDENCE_WINDOW
        )

    def _missed_with_switching_cost(
        self, present: RoleSplit, other: RoleSplit, seconds: float
    ) -> float:
        """Return the requests that `other` would have missed plus the cost of switching to it."""
        return self._backtest.count_missed(other, seconds) + self._switching_cost(present, other)

    def _switching_cost(self, present: RoleSplit, other: RoleSplit) -> float:
        """Return the switching cost in requests."""
        fixed, all_nodes = SWITCHING_COST_SECONDS
        nodes = abs(other.prefill_nodes - present.prefill_nodes) / present.total_nodes
        return (
            self._backtest.count_requests(EVIDENCE_WINDOW)
            / EVIDENCE_WINDOW
            * (fixed + all_nodes * nodes)
        )

    def _measured_attainment(
        self, snapshot: ClusterSnapshot, meter: WorkloadMeter, now: float
    ) -> float:
        """Return the measured SLO attainment; queued requests that are already late count."""
        service, ttft = (
            meter.compute_slo_results(self.target_slo, DEMAND_WINDOW, now),
            self.target_slo.ttft_seconds,
        )
        late = sum(ttft is not None and now - at > ttft for at, _ in snapshot.queued_requests)
        return (
            service.good_requests / (service.ended_requests + late)
            if service.ended_requests + late
            else 1.0
        )


def _nearest_good_split(present: RoleSplit, shares: Mapping[RoleSplit, float]) -> RoleSplit:
    """Return the nearest of the splits that are about as good as the best."""
    least = max(shares.values()) - EQUAL_ATTAINMENT
    return min(
        (split for split in shares if shares[split] >= least),
        key=lambda split: abs(split.prefill_nodes - present.prefill_nodes),
    )
