"""Who was measured slow in a hiccup is tried again, and who is slow gets a small part of the
requests."""

import pytest

from baton.types import NodeName
from coordinator.core.estimates.cost_model import (
    STALE_AFTER_SECONDS,
    TRIAL_SPACING,
    CostModel,
    DecodeStepStats,
)
from node_engine.paced.costs import PacedCosts
from simulator.scheduler_cluster import SchedulerCluster

A, B, P = NodeName("a"), NodeName("b"), NodeName("p")
COSTS = PacedCosts(prefill_us_per_token=100.0, decode_base_us=10000.0, decode_us_per_sequence=200.0)


def make_cost_model(slow: float = 10.0) -> CostModel:
    """Two decode nodes; `b` has been `slow` times as slow as `a`."""
    costs = CostModel()
    costs.node_count = 3
    for _ in range(20):
        record_costs(costs, A, 1.0, 0.0)
        record_costs(costs, B, slow, 0.0)
    return costs


def record_costs(costs: CostModel, name: NodeName, slow: float, now: float) -> None:
    costs.record_prefill(name, 100, 0, 0.1 * slow, now)
    costs.record_decode_steps(name, DecodeStepStats(0.01 * slow, 2.0, 200.0), now)
    costs.record_transfer(P, name, 1 << 20, 0.002 * slow, now)


def predict_costs(costs: CostModel, name: NodeName) -> tuple[float, float, float]:
    return (
        costs.get_node_costs(name).prefill_seconds(100, 0),
        costs.get_node_costs(name).step_seconds(2.0, 200.0),
        costs.transfer_seconds(P, name, 1 << 20),
    )


def record_other_work(costs: CostModel, count: int, now: float) -> None:
    for _ in range(count):
        record_costs(costs, A, 1.0, now)


def test_stale_estimate_is_optimistic_until_trial() -> None:
    costs = make_cost_model()
    slow, fast = predict_costs(costs, B), predict_costs(costs, A)
    record_other_work(costs, 3 * TRIAL_SPACING, STALE_AFTER_SECONDS - 0.1)
    assert predict_costs(costs, B) == pytest.approx(slow, rel=0.01), "it was heard of a moment ago"
    record_other_work(costs, 1, STALE_AFTER_SECONDS)
    assert predict_costs(costs, B) == pytest.approx(fast, rel=0.01)
    costs.on_work_placed(P, B)
    costs.on_work_placed(None, B)
    assert predict_costs(costs, B) == pytest.approx(slow, rel=0.01), "one request at a time"


def test_first_trial_report_restarts_fit() -> None:
    for now_slow in (1.0, 10.0):
        costs = make_cost_model()
        record_other_work(costs, 3 * TRIAL_SPACING + 1, STALE_AFTER_SECONDS)
        costs.on_work_placed(P, B)
        costs.on_work_placed(None, B)
        record_costs(costs, B, now_slow, STALE_AFTER_SECONDS + 1.0)
        times = [
            seen / fast
            for seen, fast in zip(predict_costs(costs, B), predict_costs(costs, A), strict=True)
        ]
        assert times == pytest.approx([now_slow] * 3, rel=0.15)


def test_estimate_is_not_stale_without_requests() -> None:
    """An idle cluster knows its nodes as before."""
    costs = make_cost_model()
    slow = predict_costs(costs, B)
    record_other_work(
        costs, 2 * TRIAL_SPACING - 1, 1e6
    )  # of four pairs at most there are so many for each
    assert predict_costs(costs, B) == pytest.approx(slow, rel=0.01)


def test_fast_node_keeps_its_estimate() -> None:
    costs = make_cost_model(slow=1.0)
    record_other_work(costs, 4 * TRIAL_SPACING, STALE_AFTER_SECONDS)
    assert costs.get_node_costs(B).prefill_fit.mean_error.count == 20
    costs.on_work_placed(None, B)
    record_costs(costs, B, 1.0, STALE_AFTER_SECONDS)
    assert costs.get_node_costs(B).prefill_fit.mean_error.count == 21


def test_trial_without_report_is_offered_again() -> None:
    costs = make_cost_model()
    for number in (1, 2):
        record_other_work(costs, 3 * TRIAL_SPACING + 1, number * STALE_AFTER_SECONDS)
        assert predict_costs(costs, B) == pytest.approx(predict_costs(costs, A), rel=0.01)
        costs.on_work_placed(P, B)
        costs.on_work_placed(None, B)


def cluster(role: str) -> tuple[SchedulerCluster, str]:
    """Two nodes of the role, and the one that has the hiccup."""
    if role == "decode":
        return SchedulerCluster(mode="disaggregated", nodes=2, prefill=1, costs=COSTS, seed=3), "d1"
    return SchedulerCluster(mode="disaggregated", nodes=1, prefill=2, costs=COSTS, seed=3), "p2"


def given(world: SchedulerCluster, node: str, since: float) -> int:
    return sum(one == node and at >= since for at, one in world.placements)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_node_is_retried_after_hiccup(role: str) -> None:
    """One request a second: with three nodes that is `TRIAL_SPACING` times three of them, so less
    than a minute."""
    world, node = cluster(role)
    world.slowdown_by_node[node] = 20.0
    for number in range(20):  # a burst, so that both are asked
        world.call_at(number / 100, lambda: world.submit_prompt(prompt_tokens=128, output_tokens=8))
    world.run(15.0)
    assert given(world, node, 0.0) >= 4
    world.slowdown_by_node.clear()
    world.schedule_poisson_load(1.0, 140.0, start=15.0, prompt_tokens=128, output_tokens=8)
    world.run(140.0)
    assert given(world, node, 15.0) - given(world, node, 80.0) >= 1, "it was tried"
    assert given(world, node, 80.0) >= 0.25 * 60, "and is as good as the other since"


@pytest.mark.slow
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_slow_node_gets_few_trials(role: str) -> None:
    world, node = cluster(role)
    world.slowdown_by_node[node] = 20.0
    world.schedule_poisson_load(2.0, 400.0, prompt_tokens=128, output_tokens=8)
    world.run(420.0)
    asked = len([one for one in world.accepted_requests if one.arrived_at >= 20.0])
    assert 1 <= given(world, node, 20.0) <= asked / TRIAL_SPACING / 2
