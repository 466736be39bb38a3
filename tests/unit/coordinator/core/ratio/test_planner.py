"""When the planner changes the ratio and when it does not, with measured demand and a manual clock.

How requests fare is tested in test_planner_loads.py and test_auto_ratio_simulated.py."""

import random

import pytest

from baton.role_split import RoleSplit
from baton.slo import Slo
from coordinator.core.estimates.workload import RequestShape, StageSeconds, WorkloadMeter
from coordinator.core.ratio.planner import (
    COOLDOWN_SECONDS,
    DEMAND_WINDOW,
    MIN_REQUESTS,
    TRIAL_PAUSE_SECONDS,
    ClusterSnapshot,
    RatioPlanner,
    _TrialSplit,
)
from tests.unit.coordinator.core.ratio.sample_profile import EIGHT, NODE_PROFILE, SLO

PROMPTS, ANSWERS = (7.0, RequestShape(680, 16.0)), (13.0, RequestShape(115, 120.0))


class PlannerHarness:
    """Demand, and a ratio that changes as soon as the planner decides it."""

    def __init__(self, split: RoleSplit, slo: Slo = SLO) -> None:
        self.meter = WorkloadMeter()
        self.planner = RatioPlanner(slo, 0.0)
        self.now = 0.0
        self.split = split
        self.switching_nodes = 0
        self.queued_requests: list[tuple[float, RequestShape]] = []
        self.ratio_changes: list[tuple[float, RoleSplit]] = []
        self._source = random.Random(1)

    def offer_load(
        self, load: tuple[float, RequestShape], seconds: float, *, good: bool | None = None
    ) -> None:
        """Offer so much load from now on, and evaluate when due. `good`: how it is served, if at
        all."""
        rate, one = load
        end, at = self.now + seconds, self.now + self._source.expovariate(rate)
        while min(at, self.planner.next_evaluation_at) <= end:
            self.now = min(at, self.planner.next_evaluation_at)
            if self.now < at:
                self.evaluate()
                continue
            self.meter.record_arrival(one.prompt_tokens, one.output_tokens, at)
            if good is not None:
                self.meter.record_end(0.5 if good else 9.0, 0.02, StageSeconds(), at)
            at += self._source.expovariate(rate)
        self.now = end

    def evaluate(self) -> None:
        sight = ClusterSnapshot(
            self.split, self.switching_nodes, EIGHT, NODE_PROFILE, self.queued_requests
        )
        wanted = self.planner.choose_split(sight, self.meter, self.now)
        if wanted is not None:
            self.ratio_changes.append((self.now, wanted))
            self.split = wanted


def test_ratio_stays_while_slo_is_met() -> None:
    helm = PlannerHarness(RoleSplit(7, 1))
    helm.offer_load(PROMPTS, 120.0, good=True)
    assert helm.ratio_changes == []
    assert helm.planner.reason.startswith("kept: ")
    assert "100% were" in helm.planner.reason


def test_changed_load_changes_ratio_after_confirmation() -> None:
    helm = PlannerHarness(RoleSplit(7, 1))
    helm.offer_load(PROMPTS, 120.0, good=True)
    helm.offer_load(ANSWERS, 60.0, good=False)
    assert 1 <= len(helm.ratio_changes) <= 4
    assert 120.0 < helm.ratio_changes[0][0] <= 140.0
    assert helm.split in (RoleSplit(2, 6), RoleSplit(3, 5), RoleSplit(4, 4))
    prefill = [7, *(split.prefill_nodes for _, split in helm.ratio_changes)]
    assert prefill == sorted(prefill, reverse=True), "never back on its way"
    assert all(
        later - earlier >= COOLDOWN_SECONDS
        for (earlier, _), (later, _) in zip(
            helm.ratio_changes, helm.ratio_changes[1:], strict=False
        )
    )


def test_no_decision_while_nodes_switch_roles() -> None:
    helm = PlannerHarness(RoleSplit(2, 6))
    helm.switching_nodes = 3
    helm.offer_load(PROMPTS, 60.0, good=False)
    assert helm.ratio_changes == []
    assert helm.planner.reason == "3 nodes are on their way to 2:6 and count as there"
    helm.switching_nodes = 0
    helm.offer_load(PROMPTS, COOLDOWN_SECONDS - 1.0, good=False)
    assert helm.ratio_changes == [], "it rests from when they were there"
    assert "of rest are left" in helm.planner.reason or "confirmed" in helm.planner.reason
    helm.offer_load(PROMPTS, COOLDOWN_SECONDS, good=False)
    assert len(helm.ratio_changes) == 1


def test_too_few_requests_change_nothing() -> None:
    helm = PlannerHarness(RoleSplit(1, 7))
    helm.offer_load((0.6 * MIN_REQUESTS / DEMAND_WINDOW, PROMPTS[1]), 120.0, good=False)
    assert helm.ratio_changes == []
    assert helm.planner.reason.endswith(f"requests in {DEMAND_WINDOW:g} s say too little")


def test_ratio_stays_when_no_split_is_better() -> None:
    helm = PlannerHarness(RoleSplit(7, 1))
    helm.offer_load(PROMPTS, 60.0, good=False)
    assert helm.ratio_changes == []
    assert helm.planner.reason.startswith("missed, and no split is predicted to do much better")


@pytest.mark.slow
def test_lasting_load_phases_are_followed() -> None:
    helm = PlannerHarness(RoleSplit(4, 4))
    seen = []
    for _ in range(3):
        for load in (PROMPTS, ANSWERS):
            helm.offer_load(load, 300.0)
            seen.append(helm.split.prefill_nodes)
    assert [prefill >= 6 for prefill in seen] == [True, False] * 3
    assert [prefill <= 3 for prefill in seen] == [False, True] * 3


def run_trials(steering: RatioPlanner, saved: int, count: int) -> list[float]:
    """Make trials that are taken back after they have saved so many requests, and return each
    pause."""
    pauses = []
    for _ in range(count):
        steering._trial = _TrialSplit(RoleSplit(4, 4), switching_cost=40.0, requests_saved=saved)
        steering._settle_trial(RoleSplit(6, 2), RoleSplit(5, 3), 1000.0)
        pauses.append(steering._trials_paused_until - 1000.0)
    return pauses


def test_failed_trials_pause_trials_with_backoff() -> None:
    steering = RatioPlanner(SLO, 0.0)
    assert run_trials(steering, 39, 5) == [
        TRIAL_PAUSE_SECONDS,
        2 * TRIAL_PAUSE_SECONDS,
        4 * TRIAL_PAUSE_SECONDS,
        8 * TRIAL_PAUSE_SECONDS,
        8 * TRIAL_PAUSE_SECONDS,
    ]
    run_trials(steering, 40, 1)
    assert run_trials(steering, 39, 1) == [TRIAL_PAUSE_SECONDS], (
        "one that has paid makes up for them"
    )


def test_further_change_in_same_direction_keeps_trial_open() -> None:
    steering = RatioPlanner(SLO, 0.0)
    steering._trial = bet = _TrialSplit(RoleSplit(4, 4), switching_cost=40.0)
    steering._settle_trial(RoleSplit(5, 3), RoleSplit(6, 2), 10.0)
    assert steering._trial is bet
    assert steering._trials_paused_until == 0.0
