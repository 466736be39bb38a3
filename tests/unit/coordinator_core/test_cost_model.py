"""Costs are learned, never negative, and outliers move them little; lengths of answers likewise."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.fit import Fit
from baton.types import NodeName
from coordinator.core.cost_model import MAX_NODES, CostModel, StepsSeen
from coordinator.core.output_length import PRIOR_SHARE, OutputLengths

A, B = NodeName("a"), NodeName("b")
SECONDS = st.floats(allow_nan=True, allow_infinity=True) | st.floats(1e-6, 100.0)


def truth(new: int, cached: int) -> float:
    return 0.01 + 2e-4 * new + 3e-8 * new * (cached + new / 2)


def prompts(count: int, seed: int = 0) -> list[tuple[int, int]]:
    chance = random.Random(seed)
    return [(chance.randrange(1, 4000), chance.choice([0, 0, chance.randrange(4000)])) for _ in range(count)]


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_prefill_is_learned_within_a_few_prompts(noise: float) -> None:
    costs, chance = CostModel(), random.Random(1)
    for new, cached in prompts(150):
        costs.prefill_took(A, new, cached, truth(new, cached) * chance.uniform(1 - noise, 1 + noise))
    for new, cached in prompts(50, seed=2):
        assert costs.node(A).prefill(new, cached) == pytest.approx(truth(new, cached), rel=0.05 + noise)
    assert costs.errors["prefill"] < 0.05 + noise


def test_a_first_prompt_scales_what_is_expected() -> None:
    costs = CostModel()
    costs.prefill_took(A, 512, 0, 10.0)
    assert costs.node(A).prefill(512, 0) == pytest.approx(10.0, rel=0.2)
    assert costs.node(B).prefill(1024, 0) > 10.0  # nobody has said anything of B: as the fleet


def test_nodes_differ_and_are_remembered_by_name() -> None:
    costs = CostModel()
    for new, cached in prompts(100):
        costs.prefill_took(A, new, cached, truth(new, cached))
        costs.prefill_took(B, new, cached, 3 * truth(new, cached))
    assert costs.node(B).prefill(1000, 0) == pytest.approx(3 * costs.node(A).prefill(1000, 0), rel=0.1)


def test_outliers_move_little() -> None:
    costs, chance = CostModel(), random.Random(3)
    for new, cached in prompts(300):
        costs.prefill_took(A, new, cached, truth(new, cached) * (100 if chance.random() < 0.05 else 1))
    assert costs.node(A).prefill(1000, 0) == pytest.approx(truth(1000, 0), rel=0.15)


def test_a_machine_that_changes_is_followed() -> None:
    costs = CostModel()
    for factor in (1, 10, 1):
        for new, cached in prompts(400):
            costs.prefill_took(A, new, cached, factor * truth(new, cached))
        assert costs.node(A).prefill(1000, 0) == pytest.approx(factor * truth(1000, 0), rel=0.1)


def test_steps_and_links() -> None:
    costs, chance = CostModel(), random.Random(4)
    for _ in range(100):
        batch, resident = chance.randrange(1, 64), chance.randrange(1, 60000)
        costs.steps_took(A, StepsSeen(0.02 + 1e-4 * batch + 1e-6 * resident, batch, resident))
        size = chance.randrange(1, 1 << 28)
        costs.transfer_took(A, B, size, 0.003 + size / 1e9)
    assert costs.node(A).step(32, 20000) == pytest.approx(0.0432, rel=0.05)
    assert costs.link(A, B, 1 << 27) == pytest.approx(0.137, rel=0.1)
    assert costs.link(B, A, 1 << 27) == pytest.approx(0.137, rel=0.1)  # as the fleet
    assert costs.link(A, B, 0) == 0.0


@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 20), SECONDS), max_size=40))
def test_no_prediction_is_negative_or_no_number(seen: list[tuple[int, int, float]]) -> None:
    costs = CostModel()
    for new, cached, seconds in seen:
        costs.prefill_took(A, new, cached, seconds)
        costs.steps_took(A, StepsSeen(seconds, new + 1, cached))
        costs.transfer_took(A, B, new + 1, seconds)
    for amount in (0, 1, 1000, 1 << 20):
        found = (costs.node(A).prefill(amount, amount), costs.node(A).step(amount, amount), costs.link(A, B, amount))
        assert all(math.isfinite(one) and one >= 0.0 for one in found)
    assert all(0.0 <= error <= 1.0 for error in costs.errors.values())


def test_what_is_no_time_teaches_nothing() -> None:
    fit = Fit((1.0, 1.0))
    for seconds in (0.0, -1.0, math.nan, math.inf, 1e9):
        assert fit.add((1.0, 1.0), seconds) is None
    assert fit.coefficients == (1.0, 1.0)


def test_what_is_remembered_is_bounded() -> None:
    costs = CostModel()
    for number in range(MAX_NODES + 5):
        costs.prefill_took(NodeName(f"n{number}"), 100, 0, 0.1)
    assert costs.node(NodeName("n0")) is costs.fleet
    assert costs.node(NodeName("n9")) is not costs.fleet


def test_lengths_by_class_and_size() -> None:
    lengths = OutputLengths()
    assert lengths.expect("x", 100) == 100 * PRIOR_SHARE
    for _ in range(200):
        lengths.took("x", 100, 100)
        lengths.took("x", 4096, 41)
        lengths.took("y", 100, 10)
    assert lengths.expect("x", 120) == pytest.approx(120, rel=0.02)
    assert lengths.expect("x", 4095 + 1) == pytest.approx(41, rel=0.1)
    assert lengths.expect("y", 100) == pytest.approx(10, rel=0.1)
    assert lengths.expect("z", 1) == 1.0
    assert lengths.error.value < 0.05
