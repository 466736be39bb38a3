"""Costs are learned, never negative, and outliers move them little; lengths of answers likewise."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.online_fit import OnlineLinearFit
from baton.types import NodeName
from coordinator.core.estimates.cost_model import MAX_NODES, CostModel, DecodeStepStats
from coordinator.core.estimates.workload import PRIOR_SHARE, OutputLengthPredictor

A, B = NodeName("a"), NodeName("b")
SECONDS = st.floats(allow_nan=True, allow_infinity=True) | st.floats(1e-6, 100.0)


def truth(new: int, cached: int) -> float:
    return 0.01 + 2e-4 * new + 3e-8 * new * (cached + new / 2)


def prompts(count: int, seed: int = 0) -> list[tuple[int, int]]:
    chance = random.Random(seed)
    return [
        (chance.randrange(1, 4000), chance.choice([0, 0, chance.randrange(4000)]))
        for _ in range(count)
    ]


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_prefill_is_learned_within_a_few_prompts(noise: float) -> None:
    costs, chance = CostModel(), random.Random(1)
    for new, cached in prompts(150):
        costs.record_prefill(
            A, new, cached, truth(new, cached) * chance.uniform(1 - noise, 1 + noise)
        )
    for new, cached in prompts(50, seed=2):
        assert costs.get_node_costs(A).prefill_seconds(new, cached) == pytest.approx(
            truth(new, cached), rel=0.05 + noise
        )
    assert costs.relative_errors["prefill"] < 0.05 + noise


def test_first_observation_scales_prior() -> None:
    costs = CostModel()
    costs.record_prefill(A, 512, 0, 10.0)
    assert costs.get_node_costs(A).prefill_seconds(512, 0) == pytest.approx(10.0, rel=0.2)
    assert (
        costs.get_node_costs(B).prefill_seconds(1024, 0) > 10.0
    )  # nobody has said anything of B: as the fleet


def test_costs_are_kept_per_node_name() -> None:
    costs = CostModel()
    for new, cached in prompts(100):
        costs.record_prefill(A, new, cached, truth(new, cached))
        costs.record_prefill(B, new, cached, 3 * truth(new, cached))
    assert costs.get_node_costs(B).prefill_seconds(1000, 0) == pytest.approx(
        3 * costs.get_node_costs(A).prefill_seconds(1000, 0), rel=0.1
    )


def test_outliers_change_fit_little() -> None:
    costs, chance = CostModel(), random.Random(3)
    for new, cached in prompts(300):
        costs.record_prefill(
            A, new, cached, truth(new, cached) * (100 if chance.random() < 0.05 else 1)
        )
    assert costs.get_node_costs(A).prefill_seconds(1000, 0) == pytest.approx(
        truth(1000, 0), rel=0.15
    )


def test_fit_follows_changed_machine() -> None:
    costs = CostModel()
    for factor in (1, 10, 1):
        for new, cached in prompts(400):
            costs.record_prefill(A, new, cached, factor * truth(new, cached))
        assert costs.get_node_costs(A).prefill_seconds(1000, 0) == pytest.approx(
            factor * truth(1000, 0), rel=0.1
        )


def test_step_and_transfer_costs_are_learned() -> None:
    costs, chance = CostModel(), random.Random(4)
    for _ in range(100):
        batch, resident = chance.randrange(1, 64), chance.randrange(1, 60000)
        costs.record_decode_steps(
            A, DecodeStepStats(0.02 + 1e-4 * batch + 1e-6 * resident, batch, resident)
        )
        size = chance.randrange(1, 1 << 28)
        costs.record_transfer(A, B, size, 0.003 + size / 1e9)
    assert costs.get_node_costs(A).step_seconds(32, 20000) == pytest.approx(0.0432, rel=0.05)
    assert costs.transfer_seconds(A, B, 1 << 27) == pytest.approx(0.137, rel=0.1)
    assert costs.transfer_seconds(B, A, 1 << 27) == pytest.approx(0.137, rel=0.1)  # as the fleet
    assert costs.transfer_seconds(A, B, 0) == 0.0


@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 20), SECONDS), max_size=40))
def test_predictions_are_finite_and_not_negative(seen: list[tuple[int, int, float]]) -> None:
    costs = CostModel()
    for new, cached, seconds in seen:
        costs.record_prefill(A, new, cached, seconds)
        costs.record_decode_steps(A, DecodeStepStats(seconds, new + 1, cached))
        costs.record_transfer(A, B, new + 1, seconds)
    for amount in (0, 1, 1000, 1 << 20):
        found = (
            costs.get_node_costs(A).prefill_seconds(amount, amount),
            costs.get_node_costs(A).step_seconds(amount, amount),
            costs.transfer_seconds(A, B, amount),
        )
        assert all(math.isfinite(one) and one >= 0.0 for one in found)
    assert all(0.0 <= error <= 1.0 for error in costs.relative_errors.values())


def test_invalid_durations_are_ignored() -> None:
    fit = OnlineLinearFit((1.0, 1.0))
    for seconds in (0.0, -1.0, math.nan, math.inf, 1e9):
        assert fit.add_observation((1.0, 1.0), seconds) is None
    assert fit.coefficients == (1.0, 1.0)


def test_remembered_nodes_are_bounded() -> None:
    costs = CostModel()
    for number in range(MAX_NODES + 5):
        costs.record_prefill(NodeName(f"n{number}"), 100, 0, 0.1)
    assert costs.get_node_costs(NodeName("n0")) is costs.fleet_costs
    assert costs.get_node_costs(NodeName("n9")) is not costs.fleet_costs


def test_output_length_is_learned_per_tenant_and_max_tokens() -> None:
    lengths = OutputLengthPredictor()
    assert lengths.predict_tokens("x", 100) == 100 * PRIOR_SHARE
    for _ in range(200):
        lengths.record_output("x", 100, 100)
        lengths.record_output("x", 4096, 41)
        lengths.record_output("y", 100, 10)
    assert lengths.predict_tokens("x", 120) == pytest.approx(120, rel=0.02)
    assert lengths.predict_tokens("x", 4095 + 1) == pytest.approx(41, rel=0.1)
    assert lengths.predict_tokens("y", 100) == pytest.approx(10, rel=0.1)
    assert lengths.predict_tokens("z", 1) == 1.0
    assert lengths.relative_error.value < 0.05
