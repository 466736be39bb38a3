"""Overload on the virtual clock: goodput, bounds and recovery."""

import gc
from collections import deque
from collections.abc import Callable
from types import FunctionType, ModuleType

import pytest

from simulator.scheduler_cluster import SchedulerCluster
from simulator.simulated_request import SimulatedRequest
from tests.open_loop import percentile
from tests.unit.coordinator.core.admission.simulated_load import (
    REQUEST_LENGTHS,
    SLOW_COSTS,
    completion_rate,
    make_cluster,
    make_tenants,
)


@pytest.mark.parametrize("retries", [False, True])
def test_goodput_holds_at_five_times_capacity(capacity: float, retries: bool) -> None:
    cluster = make_cluster(max_queue=64)
    if retries:
        cluster.on_request_end = make_retrying_clients(cluster)
    cluster.schedule_poisson_load(5 * capacity, 12.0, **REQUEST_LENGTHS)
    cluster.run(12.0)
    assert completion_rate(cluster, 4.0, 12.0) >= 0.9 * capacity
    assert cluster.peak_queue_length <= 64, "what waits is bounded"
    assert all(
        each.error is not None and each.error.retry_after for each in cluster.rejected_requests
    )
    cluster.on_request_end = lambda _: None
    cluster.run(22.0)
    assert cluster.brain.queued_requests == cluster.brain.running_requests == 0, "it has recovered"
    late = cluster.submit_prompt(**REQUEST_LENGTHS)
    cluster.run(23.0)
    assert late.ttft_seconds < 0.2


def make_retrying_clients(cluster: SchedulerCluster) -> Callable[[SimulatedRequest], None]:
    """Return a callback with which clients retry up to five times, a little after the time that
    they were told."""
    tries: dict[float, int] = {}

    def ended(served: SimulatedRequest) -> None:
        if (
            served.error is not None
            and served.error.retry_after
            and tries.get(served.arrived_at, 0) < 5
        ):
            delay = served.error.retry_after * (1 + cluster.random.random())
            when = cluster.now + delay
            tries[when] = tries.get(served.arrived_at, 0) + 1
            cluster.call_at(when, lambda: cluster.submit_prompt(served.tenant, **REQUEST_LENGTHS))

    return ended


def test_rejected_requests_leave_no_state(capacity: float) -> None:
    """The brain holds as many entries after three floods as after two."""
    cluster = make_cluster(make_tenants(bulk="standard"), max_queue=32)
    sizes: list[tuple[int, int]] = []
    for _ in range(3):
        cluster.schedule_poisson_load(
            5 * capacity, cluster.now + 5.0, start=cluster.now, tenant="bulk", **REQUEST_LENGTHS
        )
        cluster.run(cluster.now + 15.0)
        assert cluster.brain.queued_requests == cluster.brain.running_requests == 0
        sizes.append((count_entries(cluster.brain), len(cluster.accepted_requests)))
    (before, served), (after, all_served) = sizes[1:]
    kept = (
        3 * (all_served - served) + 32
    )  # a timeline, what was asked, how it was served; refusals by the second
    assert after - before <= kept, "of what was served something is kept, up to a bound"
    assert len(cluster.rejected_requests) > 2 * len(cluster.accepted_requests)


def count_entries(root: object) -> int:
    """Return the number of entries of every container that can be reached."""
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
    """No request is admitted or started whose answer would be cut off."""
    cluster = make_cluster(max_queue=1024)
    cluster.schedule_poisson_load(5 * capacity, 15.0, timeout_seconds=timeout, **REQUEST_LENGTHS)
    cluster.run(15.0)
    assert completion_rate(cluster, 5.0, 15.0) >= 0.9 * capacity
    let_in = [each for each in cluster.accepted_requests if each.arrived_at >= 5.0]
    cut_off = [each for each in let_in if each.error is not None and each.token_count]
    assert len(cut_off) <= 0.02 * len(let_in)
    errors = [seen.error for seen in cluster.rejected_requests if seen.error is not None]
    assert max(error.retry_after or 0.0 for error in errors) <= 60.0


def test_immediate_retries_do_not_collapse_goodput(capacity: float) -> None:
    cluster = make_cluster(max_queue=32)

    def retry_at_once(served: SimulatedRequest) -> None:
        if served.error is not None and cluster.now < 15.0:
            cluster.call_at(cluster.now + 0.25, lambda: cluster.submit_prompt(**REQUEST_LENGTHS))

    cluster.on_request_end = retry_at_once
    cluster.schedule_poisson_load(3 * capacity, 5.0, **REQUEST_LENGTHS)
    cluster.run(15.0)
    assert completion_rate(cluster, 3.0, 15.0) >= 0.9 * capacity
    cluster.run(25.0)
    assert cluster.brain.queued_requests == cluster.brain.running_requests == 0


def test_thousand_simultaneous_requests_are_served_at_capacity(capacity: float) -> None:
    cluster = make_cluster(max_queue=1024)
    asked = [cluster.submit_prompt(**REQUEST_LENGTHS) for _ in range(1000)]
    cluster.run(2 * 1000 / capacity)
    assert all(each.is_done for each in asked)
    assert max(each.ended_at or 0.0 for each in asked) <= 1.15 * 1000 / capacity
    assert cluster.longest_token_gap_seconds < 1.0


@pytest.mark.parametrize("reserve", [0.0, 0.3])
def test_huge_request_among_small_ones_is_served(capacity: float, reserve: float) -> None:
    """It needs more blocks than the reserve leaves to its class."""
    tenants = make_tenants(gold="premium", bulk="standard", reserve=reserve)
    cluster = make_cluster(tenants, blocks=128)
    cluster.schedule_poisson_load(0.7 * capacity, 40.0, tenant="bulk", **REQUEST_LENGTHS)
    huge: list[SimulatedRequest] = []
    cluster.call_at(5.0, lambda: huge.append(cluster.submit_prompt("bulk", 1600, 16)))
    cluster.run(60.0)
    assert huge[0].is_done
    assert huge[0].ttft_seconds < 20.0, "small ones do not starve it"
    assert len(cluster.completed_requests()) == len(cluster.accepted_requests)
    assert cluster.longest_token_gap_seconds < 5.0


def test_short_prompts_overtake_a_long_one() -> None:
    def shorts(*, behind: bool) -> tuple[list[float], SimulatedRequest | None]:
        cluster = SchedulerCluster(max_num_seqs=64, costs=SLOW_COSTS)
        long = cluster.submit_prompt(prompt_tokens=1600, output_tokens=4) if behind else None
        asked = [cluster.submit_prompt(prompt_tokens=32, output_tokens=4) for _ in range(50)]
        cluster.run(60.0)
        return [each.ttft_seconds for each in asked], long

    alone, _ = shorts(behind=False)
    passed, long = shorts(behind=True)
    assert percentile(passed, 0.95) <= 2 * percentile(alone, 0.95)
    assert long is not None
    assert long.is_done


def test_long_prompt_is_not_starved_by_short_ones(capacity: float) -> None:
    cluster = make_cluster()
    cluster.schedule_poisson_load(2 * capacity, 30.0, prompt_tokens=32, output_tokens=4)
    long: list[SimulatedRequest] = []
    cluster.call_at(
        1.0, lambda: long.append(cluster.submit_prompt(prompt_tokens=1600, output_tokens=4))
    )
    cluster.run(30.0)
    assert long[0].is_done
    alone = 1600 * SLOW_COSTS.prefill_us_per_token * 1e-6
    assert long[0].ttft_seconds <= 10 * alone


def test_request_that_cannot_meet_its_deadline_is_not_started(capacity: float) -> None:
    cluster = make_cluster()
    cluster.schedule_poisson_load(0.5 * capacity, 5.0, **REQUEST_LENGTHS)
    cluster.run(10.0)
    hopeless = cluster.submit_prompt(prompt_tokens=1600, output_tokens=4, timeout_seconds=0.05)
    cluster.run(11.0)
    assert hopeless.error is not None
    assert hopeless.error.code == "deadline_exceeded"
    assert hopeless.ended_at == hopeless.arrived_at


def test_requests_are_rejected_when_predicted_wait_exceeds_maximum(capacity: float) -> None:
    cluster = make_cluster(make_tenants(bulk="standard", max_wait=1.0), max_queue=1024)
    cluster.schedule_poisson_load(3 * capacity, 18.0, tenant="bulk", **REQUEST_LENGTHS)
    cluster.run(24.0)
    settled = [each.ttft_seconds for each in cluster.completed_requests(since=8.0)]
    assert percentile(settled, 0.95) <= 2.0
    assert completion_rate(cluster, 5.0, 18.0) >= 0.9 * capacity
