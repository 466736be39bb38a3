"""A tenant does not pay for requests that were never started."""

import pytest

from baton.cluster_link.messages import DecodeOrder, PrefillOrder
from baton.errors import Overloaded, ServiceUnavailable
from coordinator.core.admission.tenants import Tenant, TenantTable
from coordinator.core.requests.table import ADMIT_TIMEOUT_SECONDS
from tests.unit.coordinator.core.brain_harness import DECODE, PREFILL, BrainHarness

LIMITED = Tenant(
    "a", requests_per_second=0.1, request_burst=2.0, tokens_per_second=1.0, token_burst=100.0
)
PROMPT = 80


def limited() -> tuple[BrainHarness, TenantTable]:
    tenants = TenantTable(by_name={LIMITED.name: LIMITED})
    world = BrainHarness(max_queue=64)
    world.brain.reload_tenants(tenants, world.now)
    return world, tenants


def test_unserved_requests_are_refunded_in_full() -> None:
    world, tenants = limited()
    standing = tenants.make_principal(LIMITED)
    prefill = world.join_node("p0", PREFILL)
    for _ in range(5):
        request = world.submit(prompt=PROMPT, standing=standing)
        world.advance(ADMIT_TIMEOUT_SECONDS)
        assert isinstance(world.end_error(request), ServiceUnavailable)
    world.join_node("d0", DECODE)
    world.submit(prompt=PROMPT, standing=standing)
    assert world.messages_to(prefill, PrefillOrder), "served as if nothing had been"


def test_requests_expired_in_queue_are_refunded_tokens_only() -> None:
    world, tenants = limited()
    standing = tenants.make_principal(LIMITED)
    world.join_node("p0", PREFILL)
    decode = world.join_node("d0", DECODE, max_num_seqs=1)
    world.submit(max_tokens=8)
    for _ in range(2):
        request = world.submit(prompt=PROMPT, timeout=1.0, standing=standing)
        world.advance(1.0)
        assert world.end_error(request).code == "deadline_exceeded"
    assert len(world.messages_to(decode, DecodeOrder)) == 1
    account = world.brain.parts.placement.admission._accounts[LIMITED.name]
    assert account.token_bucket is not None
    assert account.token_bucket.level > 0.9 * LIMITED.token_burst
    with pytest.raises(Overloaded, match="requests_per_second"):
        world.submit(prompt=PROMPT, standing=standing)


def test_refund_does_not_exceed_burst() -> None:
    world, tenants = limited()
    world.join_node("p0", PREFILL)
    request = world.submit(prompt=PROMPT, standing=tenants.make_principal(LIMITED))
    world.advance(0.5)
    world.cancel(request)
    account = world.brain.parts.placement.admission._accounts[LIMITED.name]
    assert account.token_bucket is not None
    assert account.token_bucket.level == LIMITED.token_burst


def test_rate_limited_requests_do_not_count_as_demand() -> None:
    """They would be refused with any ratio, so they count neither for advice nor for SLO
    attainment."""
    world, tenants = limited()
    standing = tenants.make_principal(LIMITED)
    world.join_node("p0", PREFILL)
    world.join_node("d0", DECODE)
    for _ in range(2):
        world.submit(prompt=10, standing=standing)
    for _ in range(50):
        with pytest.raises(Overloaded, match="requests_per_second"):
            world.submit(prompt=10, standing=standing)
    workload = world.brain.placement_state.workload_meter.summarize_workload(60.0, world.now + 1.0)
    assert workload is not None
    assert workload.requests_per_second == pytest.approx(2.0)
    assert world.brain.ratio_controller.get_slo_results(world.now + 1.0).ended_requests == 0
    assert world.brain.counters.rejected["overloaded", "default"] == 50


def test_requests_rejected_for_full_queue_count_as_demand() -> None:
    world = BrainHarness(max_queue=1)
    world.join_node("p0", PREFILL)
    world.join_node("d0", DECODE, max_num_seqs=1)
    for _ in range(2):
        world.submit()
    for _ in range(3):
        with pytest.raises(Overloaded, match="--max-queue"):
            world.submit()
    assert world.brain.ratio_controller.get_slo_results(world.now + 1.0).ended_requests == 3
