"""`auto` on the real brain with eight nodes on a virtual clock."""

import pytest

from baton.ratio import Split
from benchmarks.ratio_workloads import SLO, SWINGING, WORKLOADS, Offered, phases
from coordinator.core.pilot import BY_HAND
from tests.split_cluster import SplitCluster

PROMPTS, ANSWERS = WORKLOADS["prompt-heavy"], WORKLOADS["output-heavy"]


def offered(split: Split, *loads: tuple[Offered, float]) -> SplitCluster:
    cluster = SplitCluster(split.prefill, split.decode)
    cluster.load(phases(loads, "simulated"))
    return cluster


def steer(cluster: SplitCluster) -> None:
    cluster.carry_out(cluster.brain.auto_ratio(SLO, 10.0, cluster.now))


@pytest.mark.parametrize("automatic", [True, False])
def test_a_load_that_turns_gets_its_objective_back(automatic: bool) -> None:
    cluster = offered(Split(7, 1), (PROMPTS, 60.0), (ANSWERS, 90.0))
    if automatic:
        steer(cluster)
    cluster.run(170.0)
    assert cluster.share(SLO, 0.0, 60.0) > 0.85
    pilot = cluster.brain.pilot
    if automatic:
        assert cluster.share(SLO, 120.0, 150.0) > 0.95
        assert 1 <= pilot.moves <= 4
        assert pilot.reason
    else:
        assert cluster.share(SLO, 80.0, 150.0) < 0.05
        assert (pilot.moves, pilot.reason) == (0, BY_HAND)
    assert all(seen.error is None for seen in cluster.seen), "no request has failed"


def test_a_load_that_swings_is_served_as_if_it_were_left_alone() -> None:
    """Twenty seconds of each, from the split that serves the whole best. More loads: test_steered_loads.py."""
    loads = [(load, 20.0) for load in SWINGING] * 4
    cluster, still = offered(Split(4, 4), *loads), offered(Split(4, 4), *loads)
    steer(cluster)
    for one in (cluster, still):
        one.run(180.0)
    assert cluster.brain.pilot.moves <= 2
    assert cluster.share(SLO) >= 0.97 * still.share(SLO)


def test_manual_freezes_it_and_set_ends_it() -> None:
    cluster = offered(Split(7, 1), (ANSWERS, 60.0))
    brain = cluster.brain
    steer(cluster)
    assert brain.pilot.automatic
    brain.manual_ratio()
    cluster.run(40.0)
    assert (brain.pilot.moves, brain.switches.generation, brain.pilot.next()) == (0, 0, None)
    steer(cluster)
    cluster.carry_out(brain.set_ratio(Split(6, 2), 10.0, cluster.now))
    assert (brain.pilot.automatic, brain.pilot.reason) == (False, BY_HAND)
    cluster.run(60.0)
    assert brain.switches.split() == Split(6, 2)


def test_a_change_under_way_is_not_doubled() -> None:
    """Nodes that take long to switch are waited for: while any is on its way nothing else is decided."""
    cluster = offered(Split(7, 1), (ANSWERS, 60.0))
    cluster.costs = cluster.costs.__class__(switch=12.0)
    steer(cluster)
    targets = set()
    for second in range(10, 60):
        cluster.run(float(second))
        if cluster.brain.switches.flips:
            targets.add((cluster.brain.switches.generation, cluster.brain.switches.target))
            assert cluster.brain.switches.heading(cluster.now) == cluster.brain.switches.target
    assert len(targets) == len({generation for generation, _ in targets}) >= 1
    assert cluster.brain.pilot.moves <= 3
