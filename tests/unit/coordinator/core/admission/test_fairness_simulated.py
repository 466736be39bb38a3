"""Fairness between tenants and classes, on the virtual clock."""

import pytest

from coordinator.core.admission.tenants import Tenant, TenantTable, derive_cache_salt
from node_engine.paced.costs import PacedCosts
from simulator.scheduler_cluster import SchedulerCluster
from tests.open_loop import percentile
from tests.unit.coordinator.core.admission.simulated_load import (
    REQUEST_LENGTHS,
    SLOW_COSTS,
    VARIED_LENGTHS,
    completion_rate,
    make_cluster,
    make_tenants,
)


def test_premium_keeps_its_latency_while_standard_offers_three_times_the_capacity(
    capacity: float,
) -> None:
    known = make_tenants(gold="premium", bulk="standard")
    alone = make_cluster(known)
    alone.schedule_poisson_load(0.2 * capacity, 16.0, tenant="gold", **REQUEST_LENGTHS)
    alone.run(20.0)
    cluster = make_cluster(known, max_queue=64)
    cluster.schedule_poisson_load(0.2 * capacity, 16.0, tenant="gold", **REQUEST_LENGTHS)
    cluster.schedule_poisson_load(3 * capacity, 16.0, tenant="bulk", **REQUEST_LENGTHS)
    cluster.run(20.0)
    alone_p95 = percentile([seen.ttft_seconds for seen in alone.completed_requests("gold")], 0.95)
    assert not [each for each in cluster.rejected_requests if each.tenant == "gold"]
    p95 = percentile([seen.ttft_seconds for seen in cluster.completed_requests("gold")], 0.95)
    assert p95 <= alone_p95 + 0.25
    assert completion_rate(cluster, 4.0, 16.0) >= 0.85 * capacity, "and standard has the rest"


def make_greedy_tenants(
    headroom: float = 0.35, reserve: float = 0.0, **limits: float
) -> TenantTable:
    """Three tenants, and a greedy one of the same weight with these `limits`."""
    made = {
        name: Tenant(name, "standard", cache_salt=derive_cache_salt(name))
        for name in ("a", "b", "c")
    }
    made["greedy"] = Tenant("greedy", "standard", cache_salt=derive_cache_salt("greedy"), **limits)
    return TenantTable(
        ("premium", "standard"), made, reserved_share=reserve, headroom_share=headroom
    )


def measure_other_tenants(cluster: SchedulerCluster, share: float, greed: float) -> list[float]:
    """Return the TTFT of three tenants that offer their shares; the greedy one offers `greed` times
    its own."""
    for name in ("a", "b", "c"):
        cluster.schedule_poisson_load(share, 20.0, tenant=name, **VARIED_LENGTHS)
    cluster.schedule_poisson_load(greed * share, 20.0, tenant="greedy", **VARIED_LENGTHS)
    cluster.run(25.0)
    assert not [each for each in cluster.rejected_requests if each.tenant != "greedy"]
    completed = cluster.completed_requests(since=5.0)
    return [seen.ttft_seconds for seen in completed if seen.tenant != "greedy"]


def make_cluster_with_few_slots(headroom: float, seed: int) -> SchedulerCluster:
    """Make a cluster whose decode nodes have few slots; it serves 17 requests a second."""
    return SchedulerCluster(
        tenants=make_greedy_tenants(headroom, reserve=0.25),
        mode="disaggregated",
        nodes=2,
        prefill=1,
        max_num_seqs=8,
        max_batched_tokens=128,
        max_queue=64,
        costs=PacedCosts(
            prefill_us_per_token=100.0, decode_base_us=40000.0, decode_us_per_sequence=20.0
        ),
        seed=seed,
    )


def test_tenant_at_ten_times_its_share_barely_delays_other_tenants() -> None:
    """As in tests/soak/test_fairness.py, requests wait only for slots of decode nodes. The greedy
    tenant leaves headroom, so that the others find a slot at once; without headroom they wait until
    a request ends."""

    def p95(headroom: float, greed: float, runs: int = 4) -> float:
        waits: list[float] = []
        for seed in range(runs):
            waits += measure_other_tenants(make_cluster_with_few_slots(headroom, seed), 3.4, greed)
        return percentile(waits, 0.95)

    fair, greedy, without = p95(0.35, 1.0), p95(0.35, 10.0), p95(0.0, 10.0, runs=2)
    assert greedy <= 1.1 * fair, f"{greedy} against {fair}"
    assert without >= 1.5 * greedy, f"{without} against {greedy}"


@pytest.mark.parametrize("seed", [0, 1])
def test_tenant_that_stops_flooding_is_served_at_its_share_within_ten_seconds(seed: int) -> None:
    """By then its backlog of 32 requests has been served, at least half of its new requests wait as
    little as those of others, and the others have not waited in the meantime."""
    cluster, stopped = make_cluster_with_few_slots(0.35, seed), 20.0
    for name in ("a", "b", "c"):
        cluster.schedule_poisson_load(3.4, stopped + 22.0, tenant=name, **VARIED_LENGTHS)
    cluster.schedule_poisson_load(34.0, stopped, tenant="greedy", **VARIED_LENGTHS)
    cluster.schedule_poisson_load(
        3.4, stopped + 22.0, start=stopped, tenant="greedy", **VARIED_LENGTHS
    )
    cluster.run(stopped + 40.0)
    waits = {
        greedy: [
            each.ttft_seconds
            for each in cluster.completed_requests(since=stopped + 10.0)
            if (each.tenant == "greedy") == greedy
        ]
        for greedy in (False, True)
    }
    assert percentile(waits[True], 0.5) <= 0.1, (
        "it would be 4 s if the flood of the last half minute still counted"
    )
    assert percentile(waits[False], 0.95) <= 0.3


def test_headroom_backlog_is_not_served_in_one_burst() -> None:
    """The greedy tenant had more than its share while headroom was off, so that it must leave
    headroom while it still floods. Its backlog at the end of the flood is then served in turn."""
    cluster = make_cluster_with_few_slots(0.0, seed=5)
    cluster.schedule_poisson_load(34.0, 45.0, tenant="greedy", **VARIED_LENGTHS)
    for start, end in ((0.0, 30.0), (35.0, 80.0)):
        for name in ("a", "b", "c"):
            cluster.schedule_poisson_load(3.4, end, start=start, tenant=name, **VARIED_LENGTHS)
    with_headroom = make_greedy_tenants(0.35, reserve=0.25)
    cluster.call_at(34.0, lambda: cluster.brain.reload_tenants(with_headroom, cluster.now))
    cluster.schedule_poisson_load(3.4, 80.0, start=45.0, tenant="greedy", **VARIED_LENGTHS)
    cluster.run(100.0)
    flood = [
        each.ttft_seconds
        for each in cluster.completed_requests("greedy", since=35.0)
        if each.arrived_at < 45.0
    ]
    assert percentile(flood, 0.5) > 2.0, "it does leave room"
    others = [
        each.ttft_seconds
        for each in cluster.completed_requests(since=45.0)
        if each.tenant != "greedy"
    ]
    assert percentile(others, 0.95) <= 0.3


@pytest.mark.parametrize(("limited", "most"), [(True, 1.1), (False, 1.3)])
def test_tenant_at_ten_times_its_share_barely_delays_others_with_prefill_bottleneck(
    capacity: float, limited: bool, most: float
) -> None:
    """The greedy tenant has a rate limit, or is bounded by weights alone. In the second case other
    tenants wait for each of its prompts at most once, and the node is kept busy."""
    limit = {"requests_per_second": capacity / 5, "request_burst": 2.0} if limited else {}

    def cluster() -> SchedulerCluster:
        known = make_greedy_tenants(**limit)
        return SchedulerCluster(
            tenants=known, max_num_seqs=16, max_batched_tokens=128, max_queue=64, costs=SLOW_COSTS
        )

    busy = cluster()
    fair = percentile(measure_other_tenants(cluster(), capacity / 5, 1.0), 0.95)
    greedy = percentile(measure_other_tenants(busy, capacity / 5, 10.0), 0.95)
    assert greedy <= most * fair, f"{greedy} against {fair}"
    assert limited or completion_rate(busy, 5.0, 20.0) >= 0.9 * capacity


def test_tenants_are_served_in_proportion_to_their_weights(capacity: float) -> None:
    made = {
        name: Tenant(name, "standard", weight) for name, weight in (("one", 1.0), ("three", 3.0))
    }
    cluster = make_cluster(TenantTable(("premium", "standard"), made), max_queue=512)
    for name in made:
        cluster.schedule_poisson_load(3 * capacity, 18.0, tenant=name, **REQUEST_LENGTHS)
    cluster.run(18.0)
    three, one = (
        sum(5.0 < (each.ended_at or 0.0) for each in cluster.completed_requests(name))
        for name in ("three", "one")
    )
    ratio = three / one
    assert 2.4 <= ratio <= 3.6


def test_device_seconds_add_up_and_recomputation_is_charged_to_preemptor(capacity: float) -> None:
    cluster = make_cluster(make_tenants(gold="premium", bulk="standard", reserve=0.0), blocks=96)
    cluster.schedule_poisson_load(
        0.6 * capacity, 12.0, tenant="bulk", prompt_tokens=64, output_tokens=128
    )
    cluster.schedule_poisson_load(
        0.2 * capacity, 12.0, start=3.0, tenant="gold", prompt_tokens=64, output_tokens=128
    )
    cluster.run(40.0)
    seconds = cluster.total_device_seconds()
    busy = seconds.pop("baton_device_busy_seconds_total")
    assert sum(seconds.values()) == pytest.approx(busy, rel=0.001)
    assert {name.partition("{")[2] for name in seconds} == {
        f'phase="{phase}",class="{tenant_class}"}}'
        for phase in ("prefill", "decode")
        for tenant_class in ("premium", "standard")
    }
    assert cluster.brain.counters.replaced_attempts["preempted"] > 0
    once = sum(
        each.prompt_tokens
        for each in cluster.accepted_requests
        if each.tenant == "gold" and each.first_token_at is not None
    )
    assert seconds['baton_device_seconds_total{phase="prefill",class="premium"}'] > 0
    assert once > 0
