"""The advised split against every split of eight nodes: the real brain on a virtual clock, four
workloads."""

import pytest

from baton.role_split import RoleSplit
from benchmarks.scenarios.ratio_workloads import NODE_COUNT, RATIO_WORKLOADS, SLO, OfferedLoad
from simulator.cost_model_cluster import CostModelCluster

SECONDS = 40.0
GOOD_ENOUGH = 0.9  # of the best split's goodput


def simulate_split(
    offered: OfferedLoad, split: RoleSplit, least: float = 0.0
) -> tuple[float, CostModelCluster]:
    """Return the goodput in requests a second, and the cluster. The run ends early once `least`
    cannot be reached."""
    cluster = CostModelCluster(split.prefill_nodes, split.decode_nodes)
    plan = offered.plan_requests("simulated", SECONDS)
    cluster.schedule_requests(plan)
    while cluster.now < SECONDS + 10.0:
        cluster.run(cluster.now + 5.0)
        lost = sum(one.has_missed_slo(SLO, cluster.now) for one in cluster.submitted_requests)
        if len(plan) - lost < least * SECONDS:
            break
    return sum(one.meets_slo(SLO) for one in cluster.submitted_requests) / SECONDS, cluster


@pytest.mark.parametrize("name", RATIO_WORKLOADS)
def test_advised_split_matches_best_simulated_split(name: str) -> None:
    """The advice is given with another split, from the arrivals and the learned costs alone."""
    offered = RATIO_WORKLOADS[name]
    _, asked = simulate_split(offered, RoleSplit(4, 4))
    advice = asked.brain.ratio_controller.get_advice(SLO, SECONDS).advice
    goodput, _ = simulate_split(offered, advice.best_split)
    best = goodput
    for prefill in range(1, NODE_COUNT):
        other, _ = simulate_split(offered, RoleSplit(prefill, NODE_COUNT - prefill), best)
        best = max(best, other)
    told = f"{advice.best_split} serves {goodput:.2f}/s, the best {best:.2f}/s"
    assert goodput >= GOOD_ENOUGH * best, told
    assert advice.get_forecast(advice.best_split).goodput == pytest.approx(goodput, rel=0.15), told
