"""Who was measured slow in a hiccup is tried again, and who is slow gets a small part of the requests."""

import pytest

from baton.types import NodeName
from coordinator.core.cost_model import TRIAL_SPACING, CostModel, StepsSeen
from coordinator.core.estimates import STALE_AFTER
from node_engine.paced import PacedCosts
from tests.virtual_cluster import VirtualCluster

A, B, P = NodeName("a"), NodeName("b"), NodeName("p")
COSTS = PacedCosts(prefill_per_token=100.0, decode_base=10000.0, decode_per_sequence=200.0)


def known(slow: float = 10.0) -> CostModel:
    """Two decode nodes; `b` has been `slow` times as slow as `a`."""
    costs = CostModel()
    costs.members = 3
    for _ in range(20):
        report(costs, A, 1.0, 0.0)
        report(costs, B, slow, 0.0)
    return costs


def report(costs: CostModel, name: NodeName, slow: float, now: float) -> None:
    costs.prefill_took(name, 100, 0, 0.1 * slow, now)
    costs.steps_took(name, StepsSeen(0.01 * slow, 2.0, 200.0), now)
    costs.transfer_took(P, name, 1 << 20, 0.002 * slow, now)


def expected(costs: CostModel, name: NodeName) -> tuple[float, float, float]:
    return costs.node(name).prefill(100, 0), costs.node(name).step(2.0, 200.0), costs.link(P, name, 1 << 20)


def others(costs: CostModel, count: int, now: float) -> None:
    for _ in range(count):
        report(costs, A, 1.0, now)


def test_what_is_old_is_predicted_as_the_fastest_until_work_was_given() -> None:
    costs = known()
    slow, fast = expected(costs, B), expected(costs, A)
    others(costs, 3 * TRIAL_SPACING, STALE_AFTER - 0.1)
    assert expected(costs, B) == pytest.approx(slow, rel=0.01), "it was heard of a moment ago"
    others(costs, 1, STALE_AFTER)
    assert expected(costs, B) == pytest.approx(fast, rel=0.01)
    costs.give_work(P, B)
    costs.give_work(None, B)
    assert expected(costs, B) == pytest.approx(slow, rel=0.01), "one request at a time"


def test_the_first_report_of_a_trial_counts_alone() -> None:
    for now_slow in (1.0, 10.0):
        costs = known()
        others(costs, 3 * TRIAL_SPACING + 1, STALE_AFTER)
        costs.give_work(P, B)
        costs.give_work(None, B)
        report(costs, B, now_slow, STALE_AFTER + 1.0)
        times = [seen / fast for seen, fast in zip(expected(costs, B), expected(costs, A), strict=True)]
        assert times == pytest.approx([now_slow] * 3, rel=0.15)


def test_time_alone_makes_nothing_old() -> None:
    """An idle cluster knows its nodes as before."""
    costs = known()
    slow = expected(costs, B)
    others(costs, 2 * TRIAL_SPACING - 1, 1e6)  # of four pairs at most there are so many for each
    assert expected(costs, B) == pytest.approx(slow, rel=0.01)


def test_who_is_as_fast_as_the_fastest_keeps_what_is_known() -> None:
    costs = known(slow=1.0)
    others(costs, 4 * TRIAL_SPACING, STALE_AFTER)
    assert costs.node(B).prefill_fit.error.count == 20
    costs.give_work(None, B)
    report(costs, B, 1.0, STALE_AFTER)
    assert costs.node(B).prefill_fit.error.count == 21


def test_a_trial_that_brings_no_report_is_offered_again() -> None:
    costs = known()
    for number in (1, 2):
        others(costs, 3 * TRIAL_SPACING + 1, number * STALE_AFTER)
        assert expected(costs, B) == pytest.approx(expected(costs, A), rel=0.01)
        costs.give_work(P, B)
        costs.give_work(None, B)


def cluster(role: str) -> tuple[VirtualCluster, str]:
    """Two nodes of the role, and the one that has the hiccup."""
    if role == "decode":
        return VirtualCluster(mode="disaggregated", nodes=2, prefill=1, costs=COSTS, seed=3), "d1"
    return VirtualCluster(mode="disaggregated", nodes=1, prefill=2, costs=COSTS, seed=3), "p2"


def given(world: VirtualCluster, node: str, since: float) -> int:
    return sum(one == node and at >= since for at, one in world.given)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_after_a_hiccup_a_node_is_asked_again_at_low_load(role: str) -> None:
    """One request a second: with three nodes that is `TRIAL_SPACING` times three of them, so less than a minute."""
    world, node = cluster(role)
    world.slowness[node] = 20.0
    for number in range(20):  # a burst, so that both are asked
        world.at(number / 100, lambda: world.ask(prompt=128, output=8))
    world.run(15.0)
    assert given(world, node, 0.0) >= 4
    world.slowness.clear()
    world.load(1.0, 140.0, start=15.0, prompt=128, output=8)
    world.run(140.0)
    assert given(world, node, 15.0) - given(world, node, 80.0) >= 1, "it was tried"
    assert given(world, node, 80.0) >= 0.25 * 60, "and is as good as the other since"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_that_is_slow_gets_a_small_part(role: str) -> None:
    world, node = cluster(role)
    world.slowness[node] = 20.0
    world.load(2.0, 400.0, prompt=128, output=8)
    world.run(420.0)
    asked = len([one for one in world.served.values() if one.arrived >= 20.0])
    assert 1 <= given(world, node, 20.0) <= asked / TRIAL_SPACING / 2
