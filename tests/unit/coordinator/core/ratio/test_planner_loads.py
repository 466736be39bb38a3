"""Mode auto under loads that change, swing, drift and burst, against a fixed ratio."""

from collections.abc import Sequence

import pytest

from baton.role_split import RoleSplit
from benchmarks.scenarios.ratio_workloads import RATIO_WORKLOADS, SWINGING_LOADS, OfferedLoad
from tests.unit.coordinator.core.ratio.planned_cluster import LoadPhases, PlannedCluster

pytestmark = pytest.mark.slow

PROMPTS, ANSWERS = RATIO_WORKLOADS["prompt-heavy"], RATIO_WORKLOADS["output-heavy"]
SEEDS = ("one", "two", "three")


def both(
    loads: LoadPhases, split: RoleSplit, seeds: Sequence[str] = SEEDS
) -> tuple[list[PlannedCluster], list[PlannedCluster]]:
    """Return the same run with `auto` and with a fixed ratio."""
    return (
        [PlannedCluster(loads, split, automatic=True, seed=seed) for seed in seeds],
        [PlannedCluster(loads, split, automatic=False, seed=seed) for seed in seeds],
    )


def mean(runs: Sequence[PlannedCluster]) -> float:
    return sum(run.attainment for run in runs) / len(runs)


@pytest.mark.parametrize(
    ("phase", "swings", "most"),
    [
        (20, 12, 2),
        pytest.param(40, 9, 4, marks=pytest.mark.thorough),
        pytest.param(60, 7, 6, marks=pytest.mark.thorough),
    ],
)
def test_swinging_load_is_no_worse_than_fixed_ratio(phase: float, swings: int, most: float) -> None:
    """Beyond the few requests that learning costs, from the split that serves the whole best.
    Each load lasts `phase` seconds."""
    steered, still = both([(load, phase) for load in SWINGING_LOADS] * swings, RoleSplit(4, 4))
    assert mean(steered) >= 0.96 * mean(still)
    assert sum(len(run.ratio_changes) for run in steered) / len(steered) <= most


@pytest.mark.parametrize("phase", [150.0, 300.0])
def test_lasting_phases_are_followed(phase: float) -> None:
    steered, still = both(
        [(load, phase) for load in SWINGING_LOADS] * 2, RoleSplit(4, 4), SEEDS[:1]
    )
    assert mean(steered) >= 1.05 * mean(still)


def test_swinging_load_from_wrong_split_ends_in_best_fixed_split() -> None:
    steered, still = both([(load, 20.0) for load in SWINGING_LOADS] * 9, RoleSplit(6, 2), SEEDS[:1])
    assert steered[0].split in (RoleSplit(4, 4), RoleSplit(5, 3))
    assert mean(steered) >= mean(still) + 0.4


@pytest.mark.parametrize(
    ("first", "second", "begin"),
    [(PROMPTS, ANSWERS, RoleSplit(7, 1)), (ANSWERS, PROMPTS, RoleSplit(3, 5))],
)
def test_changed_load_is_followed_promptly_and_once(
    first: OfferedLoad, second: OfferedLoad, begin: RoleSplit
) -> None:
    steered, still = both([(first, 80.0), (second, 120.0)], begin)
    for run in steered:
        assert 1 <= len(run.ratio_changes) <= 4
        assert run.ratio_changes[0][0] <= 80.0 + 40.0
        towards = [split.prefill_nodes - begin.prefill_nodes for _, split in run.ratio_changes]
        assert all((step > 0) == (towards[0] > 0) for step in towards), "to one side"
    assert mean(steered) >= mean(still) + 0.1


def test_lasting_change_is_followed_despite_trial_pause() -> None:
    """Trials are paused by then, but the recent history soon proves that another split is
    better."""
    loads = [(load, 60.0) for load in SWINGING_LOADS] * 4 + [(ANSWERS, 300.0)]
    run = PlannedCluster(loads, RoleSplit(4, 4), automatic=True)
    assert run.ratio_changes
    assert run.count_missed_after(600.0) <= 0.2 * ANSWERS.requests_per_second * 180.0


def test_drifting_load_is_followed() -> None:
    steps = 8
    drift = [
        (load, seconds)
        for step in range(steps)
        for load, seconds in (
            (SWINGING_LOADS[0], 3.0 * (steps - step)),
            (ANSWERS, 3.0 * (step + 1)),
        )
    ]
    steered, still = both([(PROMPTS, 60.0), *drift, (ANSWERS, 90.0)], RoleSplit(7, 1))
    assert mean(steered) >= mean(still) + 0.15
    assert all(len(run.ratio_changes) <= 6 for run in steered)


@pytest.mark.parametrize(
    ("name", "split"), [("balanced", RoleSplit(5, 3)), ("bursty", RoleSplit(6, 2))]
)
def test_noise_and_bursts_do_not_change_ratio(name: str, split: RoleSplit) -> None:
    steered, still = both([(RATIO_WORKLOADS[name], 300.0)], split)
    assert mean(steered) >= 0.97 * mean(still)
    assert all(len(run.ratio_changes) <= 2 for run in steered)


def test_wrong_split_is_left_under_steady_load() -> None:
    for load, split in ((SWINGING_LOADS[0], RoleSplit(3, 5)), (SWINGING_LOADS[1], RoleSplit(5, 3))):
        steered, still = both([(load, 120.0)], split)
        assert mean(steered) >= mean(still) + 0.2
        assert all(1 <= len(run.ratio_changes) <= 3 for run in steered)
