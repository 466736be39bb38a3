"""Prefixes that some use far more often than others, over eight nodes: hits, balance, a death, a
newcomer."""

import pytest

from coordinator.core.placement.policies import LeastLoadedPolicy, PrefixAwarePolicy
from tests.unit.coordinator.core.placement.routing_simulation import (
    PrefillJob,
    RoutingSimulation,
    ideal_hit_rate,
    zipf_jobs,
)

pytestmark = pytest.mark.slow

NODES, BLOCKS = 8, 500  # of each node; the prefixes alone are 3,200 blocks


def simulated(
    policy: PrefixAwarePolicy | LeastLoadedPolicy, jobs: list[PrefillJob]
) -> RoutingSimulation:
    simulation = RoutingSimulation(policy, NODES, BLOCKS)
    for job in jobs:
        simulation.schedule_event(job.arrived, "arrive", job)
    return simulation


@pytest.mark.parametrize("per_second", [30.0, 250.0], ids=["idle", "busy"])
@pytest.mark.parametrize("exponent", [1.0, 1.4])
def test_prefix_aware_gets_most_ideal_hits_without_hot_spot(
    per_second: float, exponent: float
) -> None:
    jobs = zipf_jobs(1000, 100, per_second, exponent=exponent)
    simulation = simulated(PrefixAwarePolicy(), jobs)
    simulation.run()
    assert simulation.done == len(jobs)
    requests, busy = simulation.imbalance()
    assert max(requests, busy) <= 1.5
    assert simulation.cached / simulation.tokens >= 0.8 * ideal_hit_rate(jobs, NODES * BLOCKS)


def test_least_loaded_gets_fewer_hits() -> None:
    jobs = zipf_jobs(600, 100, 100.0)
    aware, blind = simulated(PrefixAwarePolicy(), jobs), simulated(LeastLoadedPolicy(), jobs)
    aware.run()
    blind.run()
    assert aware.cached > 1.3 * blind.cached


def test_loss_of_hottest_node_is_absorbed() -> None:
    jobs = zipf_jobs(1200, 60, 150.0)
    simulation = simulated(PrefixAwarePolicy(), jobs)
    death = jobs[600].arrived
    simulation.schedule_event(death, "kill hottest", None)
    simulation.run()
    assert simulation.done == len(jobs)
    assert len(simulation.nodes) == NODES - 1
    assert simulation.imbalance()[1] <= 1.5

    def p95(begin: float, end: float) -> float:
        waits = sorted(wait for arrived, wait in simulation.waits if begin <= arrived < end)
        return waits[len(waits) * 95 // 100]

    assert p95(death + 1.0, float("inf")) <= 1.5 * p95(0.0, death)


def test_new_node_is_not_flooded() -> None:
    """An empty node among seven with caches: it comes to its share, and takes no more than that at
    first."""
    jobs = zipf_jobs(1000, 60, 150.0)
    simulation = RoutingSimulation(PrefixAwarePolicy(), NODES - 1, BLOCKS)
    for job in jobs[:500]:
        simulation.schedule_event(job.arrived, "arrive", job)
    simulation.run()
    before = {node.node.incarnation: node.requests for node in simulation.nodes.values()}
    simulation.add_node("new", BLOCKS)
    for job in jobs[500:]:
        simulation.schedule_event(job.arrived, "arrive", job)
    simulation.run()
    taken = {name: node.requests - before.get(name, 0) for name, node in simulation.nodes.items()}
    mean = 500 / NODES
    assert 0.3 * mean <= taken[max(taken, key=lambda name: name == "new")] <= 1.5 * mean
    assert simulation.done == len(jobs)
