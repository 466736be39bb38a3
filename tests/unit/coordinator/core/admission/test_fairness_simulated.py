"""Overload and fairness, on the virtual clock. A node here serves about 25 requests of 64 + 16
tokens a second."""

import gc
from collections import deque
from collections.abc import Callable
from types import FunctionType, ModuleType

import pytest

from coordinator.core.admission.tenants import Tenant, TenantTable, derive_cache_salt
from node_engine.paced.costs import PacedCosts
from tests.virtual_cluster import VirtualCluster, VirtualRequest, percentile

SLOW = PacedCosts(prefill_us_per_token=400.0, decode_base_us=4000.0, decode_us_per_sequence=500.0)
SHAPE = {"prompt": 64, "output": 16}


def tenants(reserve: float = 0.3, max_wait: float | None = None, **classes: str) -> TenantTable:
    made = {
        name: Tenant(name, tenant_class, cache_salt=derive_cache_salt(name))
        for name, tenant_class in classes.items()
    }
    waits = {} if max_wait is None else dict.fromkeys(("premium", "standard", "batch"), max_wait)
    return TenantTable(("premium", "standard", "batch"), made, (), reserve, waits)


def cluster(known: TenantTable | None = None, **settings: object) -> VirtualCluster:
    return VirtualCluster(
        tenants=known,
        max_num_seqs=16,
        costs=SLOW,
        **settings,  # type: ignore[arg-type]
    )


def rate_of(world: VirtualCluster, since: float, until: float) -> float:
    done = [
        each
        for each in world.requests.values()
        if each.is_done and each.ended_at and since <= each.ended_at < until
    ]
    return len(done) / (until - since)


@pytest.fixture(scope="module")
def capacity() -> float:
    """Requests a second that a saturated node ends."""
    world = cluster(max_queue=64)
    world.schedule_poisson_load(100.0, 20.0, **SHAPE)
    world.run(20.0)
    return rate_of(world, 5.0, 20.0)


@pytest.mark.parametrize("retries", [False, True])
def test_goodput_holds_at_five_times_capacity(capacity: float, retries: bool) -> None:
    world = cluster(max_queue=64)
    if retries:
        world.on_request_end = again(world)
    world.schedule_poisson_load(5 * capacity, 12.0, **SHAPE)
    world.run(12.0)
    assert rate_of(world, 4.0, 12.0) >= 0.9 * capacity
    assert world.peak_queue_length <= 64, "what waits is bounded"
    assert all(each.error is not None and each.error.retry_after for each in world.refused_requests)
    world.on_request_end = lambda _: None
    world.run(22.0)
    assert world.brain.queued_requests == world.brain.running_requests == 0, "it has recovered"
    late = world.submit_request(**SHAPE)
    world.run(23.0)
    assert late.ttft_seconds < 0.2


def again(world: VirtualCluster) -> Callable[[VirtualRequest], None]:
    """Clients that come back when they are told to, a little later, five times."""
    tries: dict[float, int] = {}

    def ended(served: VirtualRequest) -> None:
        if (
            served.error is not None
            and served.error.retry_after
            and tries.get(served.arrived_at, 0) < 5
        ):
            delay = served.error.retry_after * (1 + world.random.random())
            when = world.now + delay
            tries[when] = tries.get(served.arrived_at, 0) + 1
            world.call_at(when, lambda: world.submit_request(served.tenant, **SHAPE))

    return ended


def test_rejected_requests_leave_no_state(capacity: float) -> None:
    """All that the brain holds, counted entry by entry, after twice the storm as after the
    storm."""
    world = cluster(tenants(bulk="standard"), max_queue=32)
    sizes: list[tuple[int, int]] = []
    for _ in range(3):
        world.schedule_poisson_load(
            5 * capacity, world.now + 5.0, start=world.now, tenant="bulk", **SHAPE
        )
        world.run(world.now + 15.0)
        assert world.brain.queued_requests == world.brain.running_requests == 0
        sizes.append((entries(world.brain), len(world.requests)))
    (before, served), (after, all_served) = sizes[1:]
    kept = (
        3 * (all_served - served) + 32
    )  # a timeline, what was asked, how it was served; refusals by the second
    assert after - before <= kept, "of what was served something is kept, up to a bound"
    assert len(world.refused_requests) > 2 * len(world.requests)


def entries(root: object) -> int:
    """Entries of every container that can be reached."""
    seen, left, found = {id(root)}, [root], 0
    while left:
        each = left.pop()
        if isinstance(each, dict | list | set | deque):
            found += len(each)
        for other in gc.get_referents(each):
            if id(other) not in seen and not isinstance(other, type | ModuleType | FunctionType):
                seen.add(id(other))
                left.append(other)
    return found


@pytest.mark.parametrize("timeout", [2.0, 8.0])
def test_admission_rejects_requests_that_would_miss_deadlines(
    capacity: float, timeout: float
) -> None:
    """Nobody is let in, or begun, whose answer would be cut off."""
    world = cluster(max_queue=1024)
    world.schedule_poisson_load(5 * capacity, 15.0, timeout=timeout, **SHAPE)
    world.run(15.0)
    assert rate_of(world, 5.0, 15.0) >= 0.9 * capacity
    let_in = [each for each in world.requests.values() if each.arrived_at >= 5.0]
    cut_off = [each for each in let_in if each.error is not None and each.token_count]
    assert len(cut_off) <= 0.02 * len(let_in)
    assert (
        max(each.error.retry_after or 0.0 for each in world.refused_requests if each.error) <= 60.0
    )


def test_immediate_retries_do_not_collapse_goodput(capacity: float) -> None:
    world = cluster(max_queue=32)

    def at_once(served: VirtualRequest) -> None:
        if served.error is not None and world.now < 15.0:
            world.call_at(world.now + 0.25, lambda: world.submit_request(**SHAPE))

    world.on_request_end = at_once
    world.schedule_poisson_load(3 * capacity, 5.0, **SHAPE)
    world.run(15.0)
    assert rate_of(world, 3.0, 15.0) >= 0.9 * capacity
    world.run(25.0)
    assert world.brain.queued_requests == world.brain.running_requests == 0


def test_thousand_simultaneous_requests(capacity: float) -> None:
    world = cluster(max_queue=1024)
    asked = [world.submit_request(**SHAPE) for _ in range(1000)]
    world.run(2 * 1000 / capacity)
    assert all(each.is_done for each in asked)
    assert max(each.ended_at or 0.0 for each in asked) <= 1.15 * 1000 / capacity
    assert world.longest_token_gap_seconds < 1.0


@pytest.mark.parametrize("reserve", [0.0, 0.3])
def test_huge_request_among_small_ones_is_served(capacity: float, reserve: float) -> None:
    """It needs more blocks than a reserve leaves to its class."""
    world = cluster(tenants(gold="premium", bulk="standard", reserve=reserve), blocks=128)
    world.schedule_poisson_load(0.7 * capacity, 40.0, tenant="bulk", **SHAPE)
    huge: list[VirtualRequest] = []
    world.call_at(5.0, lambda: huge.append(world.submit_request("bulk", prompt=1600, output=16)))
    world.run(60.0)
    assert huge[0].is_done
    assert huge[0].ttft_seconds < 20.0, "small ones do not starve it"
    assert len(world.completed_requests()) == len(world.requests)
    assert world.longest_token_gap_seconds < 5.0


def test_short_prompts_pass_a_long_one() -> None:
    def shorts(*, behind: bool) -> tuple[list[float], VirtualRequest | None]:
        world = VirtualCluster(max_num_seqs=64, costs=SLOW)
        long = world.submit_request(prompt=1600, output=4) if behind else None
        asked = [world.submit_request(prompt=32, output=4) for _ in range(50)]
        world.run(60.0)
        return [each.ttft_seconds for each in asked], long

    alone, _ = shorts(behind=False)
    passed, long = shorts(behind=True)
    assert percentile(passed, 0.95) <= 2 * percentile(alone, 0.95)
    assert long is not None
    assert long.is_done


def test_a_long_prompt_is_not_starved_by_short_ones(capacity: float) -> None:
    world = cluster()
    world.schedule_poisson_load(2 * capacity, 30.0, prompt=32, output=4)
    long: list[VirtualRequest] = []
    world.call_at(1.0, lambda: long.append(world.submit_request(prompt=1600, output=4)))
    world.run(30.0)
    assert long[0].is_done
    alone = 1600 * SLOW.prefill_us_per_token * 1e-6
    assert long[0].ttft_seconds <= 10 * alone


def test_premium_keeps_its_latency_while_standard_offers_three_times_the_capacity(
    capacity: float,
) -> None:
    known = tenants(gold="premium", bulk="standard")
    alone = cluster(known)
    alone.schedule_poisson_load(0.2 * capacity, 16.0, tenant="gold", **SHAPE)
    alone.run(20.0)
    world = cluster(known, max_queue=64)
    world.schedule_poisson_load(0.2 * capacity, 16.0, tenant="gold", **SHAPE)
    world.schedule_poisson_load(3 * capacity, 16.0, tenant="bulk", **SHAPE)
    world.run(20.0)
    slo = percentile([each.ttft_seconds for each in alone.completed_requests("gold")], 0.95) + 0.25
    assert not [each for each in world.refused_requests if each.tenant == "gold"]
    assert percentile([each.ttft_seconds for each in world.completed_requests("gold")], 0.95) <= slo
    assert rate_of(world, 4.0, 16.0) >= 0.85 * capacity, "and standard has the rest"


def four(headroom: float = 0.35, reserve: float = 0.0, **limits: float) -> TenantTable:
    """`limits` are the greedy one's."""
    made = {
        name: Tenant(name, "standard", cache_salt=derive_cache_salt(name))
        for name in ("a", "b", "c")
    }
    made["greedy"] = Tenant("greedy", "standard", cache_salt=derive_cache_salt("greedy"), **limits)
    return TenantTable(
        ("premium", "standard"), made, reserved_share=reserve, headroom_share=headroom
    )


def others(world: VirtualCluster, share: float, greed: float) -> list[float]:
    """TTFT of three tenants at their shares beside one at `greed` times its own."""
    for name in ("a", "b", "c"):
        world.schedule_poisson_load(share, 30.0, tenant=name, vary=True, **SHAPE)
    world.schedule_poisson_load(greed * share, 30.0, tenant="greedy", vary=True, **SHAPE)
    world.run(35.0)
    assert not [each for each in world.refused_requests if each.tenant != "greedy"]
    return [
        each.ttft_seconds for each in world.completed_requests(since=5.0) if each.tenant != "greedy"
    ]


def few_places(headroom: float, seed: int) -> VirtualCluster:
    """It ends 17 requests a second on the places of their class."""
    return VirtualCluster(
        tenants=four(headroom, reserve=0.25),
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


def test_one_tenant_at_ten_times_its_share_costs_the_others_little() -> None:
    """As in tests/soak/test_fairness.py decode nodes have too few places, and prompts wait for
    nothing else. It leaves the others room, and they find a place as before; without that they wait
    for somebody's end."""

    def p95(headroom: float, greed: float, runs: int = 4) -> float:
        waits: list[float] = []
        for seed in range(runs):
            waits += others(few_places(headroom, seed), 3.4, greed)
        return percentile(waits, 0.95)

    fair, greedy, without = p95(0.35, 1.0), p95(0.35, 10.0), p95(0.0, 10.0, runs=2)
    assert greedy <= 1.1 * fair, f"{greedy} against {fair}"
    assert without >= 1.5 * greedy, f"{without} against {greedy}"


@pytest.mark.parametrize("seed", [0, 1])
def test_a_tenant_that_stopped_flooding_is_back_at_its_share_within_10_seconds(seed: int) -> None:
    """Then its line of 32 requests has been served, at least half of what it asks waits as little
    as what others ask, and these have not waited meanwhile."""
    world, stopped = few_places(0.35, seed), 20.0
    for name in ("a", "b", "c"):
        world.schedule_poisson_load(3.4, stopped + 22.0, tenant=name, vary=True, **SHAPE)
    world.schedule_poisson_load(34.0, stopped, tenant="greedy", vary=True, **SHAPE)
    world.schedule_poisson_load(
        3.4, stopped + 22.0, start=stopped, tenant="greedy", vary=True, **SHAPE
    )
    world.run(stopped + 40.0)
    waits = {
        greedy: [
            each.ttft_seconds
            for each in world.completed_requests(since=stopped + 10.0)
            if (each.tenant == "greedy") == greedy
        ]
        for greedy in (False, True)
    }
    assert percentile(waits[True], 0.5) <= 0.1, (
        "4 s if the flood of the last half minute told against it"
    )
    assert percentile(waits[False], 0.95) <= 0.3


def test_headroom_backlog_is_not_served_in_one_burst() -> None:
    """It has had more than its share while headroom was off, and leaves room for that while it
    still floods. What has piled up by the end of the flood goes in turn."""
    world = few_places(0.0, seed=5)
    world.schedule_poisson_load(34.0, 45.0, tenant="greedy", vary=True, **SHAPE)
    for start, end in ((0.0, 30.0), (35.0, 80.0)):
        for name in ("a", "b", "c"):
            world.schedule_poisson_load(3.4, end, start=start, tenant=name, vary=True, **SHAPE)
    world.call_at(34.0, lambda: world.brain.reload_tenants(four(0.35, reserve=0.25), world.now))
    world.schedule_poisson_load(3.4, 80.0, start=45.0, tenant="greedy", vary=True, **SHAPE)
    world.run(100.0)
    flood = [
        each.ttft_seconds
        for each in world.completed_requests("greedy", since=35.0)
        if each.arrived_at < 45.0
    ]
    assert percentile(flood, 0.5) > 2.0, "it does leave room"
    others = [
        each.ttft_seconds
        for each in world.completed_requests(since=45.0)
        if each.tenant != "greedy"
    ]
    assert percentile(others, 0.95) <= 0.3


@pytest.mark.parametrize(("limited", "most"), [(True, 1.1), (False, 1.3)])
def test_one_tenant_at_ten_times_its_share_with_prefill_bottleneck(
    capacity: float, limited: bool, most: float
) -> None:
    """Its share is a limit of its own, or follows from weights alone. Then its prompts still are
    computed in steps that others have to wait for, each of them once, and the node is kept busy."""
    limit = {"requests_per_second": capacity / 5, "request_burst": 2.0} if limited else {}

    def world() -> VirtualCluster:
        known = four(**limit)
        return VirtualCluster(
            tenants=known, max_num_seqs=16, max_batched_tokens=128, max_queue=64, costs=SLOW
        )

    busy = world()
    fair = percentile(others(world(), capacity / 5, 1.0), 0.95)
    greedy = percentile(others(busy, capacity / 5, 10.0), 0.95)
    assert greedy <= most * fair, f"{greedy} against {fair}"
    assert limited or rate_of(busy, 5.0, 30.0) >= 0.9 * capacity


def test_shares_follow_weights(capacity: float) -> None:
    made = {
        name: Tenant(name, "standard", weight) for name, weight in (("one", 1.0), ("three", 3.0))
    }
    world = cluster(TenantTable(("premium", "standard"), made), max_queue=512)
    for name in made:
        world.schedule_poisson_load(3 * capacity, 18.0, tenant=name, **SHAPE)
    world.run(18.0)
    three, one = (
        sum(5.0 < (each.ended_at or 0.0) for each in world.completed_requests(name))
        for name in ("three", "one")
    )
    ratio = three / one
    assert 2.4 <= ratio <= 3.6


def test_device_seconds_add_up_and_recompute_is_charged_to_preemptor(capacity: float) -> None:
    world = cluster(tenants(gold="premium", bulk="standard", reserve=0.0), blocks=96)
    world.schedule_poisson_load(0.6 * capacity, 12.0, tenant="bulk", prompt=64, output=128)
    world.schedule_poisson_load(
        0.2 * capacity, 12.0, start=3.0, tenant="gold", prompt=64, output=128
    )
    world.run(40.0)
    seconds = world.total_device_seconds()
    busy = seconds.pop("baton_device_busy_seconds_total")
    assert sum(seconds.values()) == pytest.approx(busy, rel=0.001)
    assert {name.partition("{")[2] for name in seconds} == {
        f'phase="{phase}",class="{tenant_class}"}}'
        for phase in ("prefill", "decode")
        for tenant_class in ("premium", "standard")
    }
    assert world.brain.counters.replaced_attempts["preempted"] > 0
    once = sum(
        each.prompt_tokens
        for each in world.requests.values()
        if each.tenant == "gold" and each.first_token_at is not None
    )
    assert seconds['baton_device_seconds_total{phase="prefill",class="premium"}'] > 0
    assert once > 0


def test_hopeless_requests_are_not_started(capacity: float) -> None:
    world = cluster()
    world.schedule_poisson_load(0.5 * capacity, 5.0, **SHAPE)
    world.run(10.0)
    hopeless = world.submit_request(prompt=1600, output=4, timeout=0.05)
    world.run(11.0)
    assert hopeless.error is not None
    assert hopeless.error.code == "deadline_exceeded"
    assert hopeless.ended_at == hopeless.arrived_at


def test_predicted_wait_rejects_requests(capacity: float) -> None:
    world = cluster(tenants(bulk="standard", max_wait=1.0), max_queue=1024)
    world.schedule_poisson_load(3 * capacity, 18.0, tenant="bulk", **SHAPE)
    world.run(24.0)
    settled = [each.ttft_seconds for each in world.completed_requests(since=8.0)]
    assert percentile(settled, 0.95) <= 2.0
    assert rate_of(world, 5.0, 18.0) >= 0.9 * capacity
