"""Zipf-distributed prefixes over eight nodes: hit rate, balance, loss of a node and a new node."""

import pytest

from coordinator.core.placement.policies import LeastLoadedPolicy, PrefixAwarePolicy
from simulator.prefill_routing import (
    PrefillJob,
    PrefillRoutingSimulation,
    draw_zipf_jobs,
    ideal_hit_rate,
)

pytestmark = pytest.mark.slow

NODES, BLOCKS = 8, 500  # of each node; the prefixes alone are 3,200 blocks


def simulated(
    policy: PrefixAwarePolicy | LeastLoadedPolicy, jobs: list[PrefillJob]
) -> PrefillRoutingSimulation:
    simulation = PrefillRoutingSimulation(policy, NODES, BLOCKS)
    simulation.schedule_jobs(jobs)
    return simulation


@pytest.mark.parametrize("per_second", [30.0, 250.0], ids=["idle", "busy"])
@pytest.mark.parametrize("exponent", [1.0, 1.4])
def test_prefix_aware_gets_most_ideal_hits_without_hot_spot(
    per_second: float, exponent: float
) -> None:
    jobs = draw_zipf_jobs(1000, 100, per_second, exponent=exponent)
    simulation = simulated(PrefixAwarePolicy(), jobs)
    simulation.run()
    assert simulation.done_count == len(jobs)
    requests, busy = simulation.imbalance()
    assert max(requests, busy) <= 1.5
    assert simulation.cached_tokens / simulation.prompt_tokens >= 0.8 * ideal_hit_rate(
        jobs, NODES * BLOCKS
    )


def test_least_loaded_gets_fewer_hits() -> None:
    jobs = draw_zipf_jobs(600, 100, 100.0)
    aware, blind = simulated(PrefixAwarePolicy(), jobs), simulated(LeastLoadedPolicy(), jobs)
    aware.run()
    blind.run()
    assert aware.cached_tokens > 1.3 * blind.cached_tokens


def test_loss_of_hottest_node_is_absorbed() -> None:
    jobs = draw_zipf_jobs(1200, 60, 150.0)
    simulation = simulated(PrefixAwarePolicy(), jobs)
    death = jobs[600].arrived
    simulation.call_at(death, simulation.kill_busiest_node)
    simulation.run()
    assert simulation.done_count == len(jobs)
    assert len(simulation.nodes) == NODES - 1
    assert simulation.imbalance()[1] <= 1.5

    def p95(begin: float, end: float) -> float:
        waits = sorted(wait for arrived, wait in simulation.waits if begin <= arrived < end)
        return waits[len(waits) * 95 // 100]

    assert p95(death + 1.0, float("inf")) <= 1.5 * p95(0.0, death)


def test_new_node_is_not_flooded() -> None:
    """An empty node among seven with caches gets about its share of requests, and not more at
    first."""
    jobs = draw_zipf_jobs(1000, 60, 150.0)
    simulation = PrefillRoutingSimulation(PrefixAwarePolicy(), NODES - 1, BLOCKS)
    simulation.schedule_jobs(jobs[:500])
    simulation.run()
    before = {node.member.incarnation: node.request_count for node in simulation.nodes.values()}
    simulation.add_node("new", BLOCKS)
    simulation.schedule_jobs(jobs[500:])
    simulation.run()
    taken = {
        name: node.request_count - before.get(name, 0) for name, node in simulation.nodes.items()
    }
    mean = 500 / NODES
    assert 0.3 * mean <= taken[max(taken, key=lambda name: name == "new")] <= 1.5 * mean
    assert simulation.done_count == len(jobs)
