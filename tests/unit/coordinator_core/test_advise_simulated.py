"""Advice against every split of eight nodes, played through: the real brain on a virtual clock, four workloads."""

import pytest

from baton.ratio import Split
from benchmarks.ratio_workloads import NODES, SLO, WORKLOADS, Offered
from tests.split_cluster import SplitCluster

SECONDS = 40.0
GOOD_ENOUGH = 0.9  # of the best split's goodput


def played(offered: Offered, split: Split, least: float = 0.0) -> tuple[float, SplitCluster]:
    """Good requests a second, and the cluster after it. It is given up once it cannot come to `least` any more."""
    cluster = SplitCluster(split.prefill, split.decode)
    plan = offered.plan("simulated", SECONDS)
    cluster.load(plan)
    while cluster.now < SECONDS + 10.0:
        cluster.run(cluster.now + 5.0)
        lost = sum(one.hopeless(SLO, cluster.now) for one in cluster.seen)
        if len(plan) - lost < least * SECONDS:
            break
    return sum(one.good(SLO) for one in cluster.seen) / SECONDS, cluster


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_advised_split_serves_as_much_as_the_best(name: str) -> None:
    """The advice is given in the wrong ratio, of which it knows nothing but what arrives and what things take."""
    offered = WORKLOADS[name]
    _, asked = played(offered, Split(4, 4))
    advice = asked.brain.pilot.advise(SLO, SECONDS).advice
    goodput, _ = played(offered, advice.best)
    best = goodput
    for prefill in range(1, NODES):
        other, _ = played(offered, Split(prefill, NODES - prefill), best)
        best = max(best, other)
    told = f"{advice.best} serves {goodput:.2f}/s, the best {best:.2f}/s"
    assert goodput >= GOOD_ENOUGH * best, told
    assert advice.of(advice.best).goodput == pytest.approx(goodput, rel=0.15), told
