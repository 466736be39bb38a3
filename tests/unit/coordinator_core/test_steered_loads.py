"""What `auto` makes of loads that turn, swing, drift and burst, against leaving the ratio alone."""

from collections.abc import Sequence

import pytest

from baton.ratio import Split
from benchmarks.ratio_workloads import SWINGING, WORKLOADS, Offered
from tests.unit.coordinator_core.steered import Phases, Steered

PROMPTS, ANSWERS = WORKLOADS["prompt-heavy"], WORKLOADS["output-heavy"]
SEEDS = ("one", "two", "three")


def both(loads: Phases, split: Split, seeds: Sequence[str] = SEEDS) -> tuple[list[Steered], list[Steered]]:
    """With `auto`, and left alone."""
    return (
        [Steered(loads, split, automatic=True, seed=seed) for seed in seeds],
        [Steered(loads, split, automatic=False, seed=seed) for seed in seeds],
    )


def mean(runs: Sequence[Steered]) -> float:
    return sum(run.share for run in runs) / len(runs)


@pytest.mark.parametrize(("phase", "swings", "most"), [(20, 12, 2), (40, 9, 4), (60, 7, 6)])
def test_a_load_that_swings_costs_no_more_than_leaving_it_alone(phase: float, swings: int, most: float) -> None:
    """Beyond the few requests that it takes to learn. From the split that serves the whole best; `phase` seconds of
    each load, so that a period takes twice as long."""
    steered, still = both([(load, phase) for load in SWINGING] * swings, Split(4, 4))
    assert mean(steered) >= 0.96 * mean(still)
    assert sum(len(run.moves) for run in steered) / len(steered) <= most


@pytest.mark.parametrize("phase", [150.0, 300.0])
def test_phases_that_last_are_followed(phase: float) -> None:
    steered, still = both([(load, phase) for load in SWINGING] * 2, Split(4, 4), SEEDS[:1])
    assert mean(steered) >= 1.05 * mean(still)


def test_a_swing_from_the_wrong_split_ends_in_one_that_serves_the_whole() -> None:
    steered, still = both([(load, 20.0) for load in SWINGING] * 9, Split(6, 2), SEEDS[:1])
    assert steered[0].split in (Split(4, 4), Split(5, 3))
    assert mean(steered) >= mean(still) + 0.4


@pytest.mark.parametrize(
    ("first", "second", "begin"), [(PROMPTS, ANSWERS, Split(7, 1)), (ANSWERS, PROMPTS, Split(3, 5))]
)
def test_a_load_that_turns_is_followed_soon_and_once(first: Offered, second: Offered, begin: Split) -> None:
    steered, still = both([(first, 80.0), (second, 120.0)], begin)
    for run in steered:
        assert 1 <= len(run.moves) <= 4
        assert run.moves[0][0] <= 80.0 + 40.0
        towards = [split.prefill - begin.prefill for _, split in run.moves]
        assert all((step > 0) == (towards[0] > 0) for step in towards), "to one side"
    assert mean(steered) >= mean(still) + 0.1


def test_it_turns_though_it_has_learned_that_the_load_swings() -> None:
    """Bets are paused by then. What has come since tells against the present split soon enough all the same."""
    loads = [(load, 60.0) for load in SWINGING] * 4 + [(ANSWERS, 300.0)]
    run = Steered(loads, Split(4, 4), automatic=True)
    assert run.moves
    assert run.late_after(600.0) <= 0.2 * ANSWERS.rate * 180.0


def test_a_load_that_drifts_is_followed() -> None:
    steps = 8
    drift = [
        (load, seconds)
        for step in range(steps)
        for load, seconds in ((SWINGING[0], 3.0 * (steps - step)), (ANSWERS, 3.0 * (step + 1)))
    ]
    steered, still = both([(PROMPTS, 60.0), *drift, (ANSWERS, 90.0)], Split(7, 1))
    assert mean(steered) >= mean(still) + 0.15
    assert all(len(run.moves) <= 6 for run in steered)


@pytest.mark.parametrize(("name", "split"), [("balanced", Split(5, 3)), ("bursty", Split(6, 2))])
def test_noise_and_bursts_are_no_reason_to_move(name: str, split: Split) -> None:
    steered, still = both([(WORKLOADS[name], 300.0)], split)
    assert mean(steered) >= 0.97 * mean(still)
    assert all(len(run.moves) <= 2 for run in steered)


def test_the_wrong_split_of_a_steady_load_is_left() -> None:
    for load, split in ((SWINGING[0], Split(3, 5)), (SWINGING[1], Split(5, 3))):
        steered, still = both([(load, 120.0)], split)
        assert mean(steered) >= mean(still) + 0.2
        assert all(1 <= len(run.moves) <= 3 for run in steered)
