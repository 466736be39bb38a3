"""`auto` on the real brain with eight nodes on a virtual clock."""

import pytest

from baton.role_split import RoleSplit
from benchmarks.scenarios.ratio_workloads import (
    RATIO_WORKLOADS,
    SLO,
    SWINGING_LOADS,
    OfferedLoad,
    plan_phases,
)
from coordinator.core.ratio.controller import MANUAL_REASON
from simulator.cost_model_cluster import CostModelCluster

PROMPTS, ANSWERS = RATIO_WORKLOADS["prompt-heavy"], RATIO_WORKLOADS["output-heavy"]


def make_cluster(split: RoleSplit, *loads: tuple[OfferedLoad, float]) -> CostModelCluster:
    cluster = CostModelCluster(split.prefill_nodes, split.decode_nodes)
    cluster.schedule_requests(plan_phases(loads, "simulated"))
    return cluster


def enable_auto_ratio(cluster: CostModelCluster) -> None:
    cluster.apply_effects(cluster.brain.set_auto_ratio(SLO, 10.0, cluster.now))


@pytest.mark.parametrize("automatic", [True, False])
def test_slo_recovers_after_load_change(automatic: bool) -> None:
    cluster = make_cluster(RoleSplit(7, 1), (PROMPTS, 60.0), (ANSWERS, 90.0))
    if automatic:
        enable_auto_ratio(cluster)
    cluster.run(170.0)
    assert cluster.slo_attainment(SLO, 0.0, 60.0) > 0.85
    pilot = cluster.brain.ratio_controller
    if automatic:
        assert cluster.slo_attainment(SLO, 120.0, 150.0) > 0.95
        assert 1 <= pilot.change_count <= 4
        assert pilot.reason
    else:
        assert cluster.slo_attainment(SLO, 80.0, 150.0) < 0.05
        assert (pilot.change_count, pilot.reason) == (0, MANUAL_REASON)
    assert all(seen.error is None for seen in cluster.submitted_requests), "no request has failed"


def test_swinging_load_is_served_as_with_fixed_ratio() -> None:
    """The load changes every twenty seconds, from the split that serves the whole best.
    test_planner_loads.py has more loads."""
    loads = [(load, 20.0) for load in SWINGING_LOADS] * 4
    cluster, still = make_cluster(RoleSplit(4, 4), *loads), make_cluster(RoleSplit(4, 4), *loads)
    enable_auto_ratio(cluster)
    for one in (cluster, still):
        one.run(180.0)
    assert cluster.brain.ratio_controller.change_count <= 2
    assert cluster.slo_attainment(SLO) >= 0.97 * still.slo_attainment(SLO)


def test_manual_freezes_ratio_and_set_ends_auto() -> None:
    cluster = make_cluster(RoleSplit(7, 1), (ANSWERS, 60.0))
    brain = cluster.brain
    enable_auto_ratio(cluster)
    assert brain.ratio_controller.is_automatic
    brain.set_manual_ratio()
    cluster.run(40.0)
    assert (
        brain.ratio_controller.change_count,
        brain.role_switcher.target_generation,
        brain.ratio_controller.next_evaluation_at(),
    ) == (0, 0, None)
    enable_auto_ratio(cluster)
    cluster.apply_effects(brain.set_ratio(RoleSplit(6, 2), 10.0, cluster.now))
    assert (brain.ratio_controller.is_automatic, brain.ratio_controller.reason) == (
        False,
        MANUAL_REASON,
    )
    cluster.run(60.0)
    assert brain.role_switcher.roles.current_split() == RoleSplit(6, 2)


def test_no_second_change_while_one_is_pending() -> None:
    """While a node is switching its role, nothing else is decided."""
    cluster = make_cluster(RoleSplit(7, 1), (ANSWERS, 60.0))
    cluster.costs = cluster.costs.__class__(role_switch_seconds=12.0)
    enable_auto_ratio(cluster)
    targets = set()
    for second in range(10, 60):
        cluster.run(float(second))
        if cluster.brain.role_switcher.pending:
            targets.add(
                (
                    cluster.brain.role_switcher.target_generation,
                    cluster.brain.role_switcher.target_split,
                )
            )
            assert (
                cluster.brain.role_switcher.roles.projected_split()
                == cluster.brain.role_switcher.target_split
            )
    assert len(targets) == len({generation for generation, _ in targets}) >= 1
    assert cluster.brain.ratio_controller.change_count <= 3
