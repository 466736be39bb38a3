"""Tenants, their limits and who is let in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster_link.messages import AttemptFailed, DecodeOrder
from baton.errors import DeadlineExceeded, Overloaded, Preempted
from baton.types import NodeName, Principal, Request, RequestId, SamplingParams
from coordinator.core.admission.admission_controller import AdmissionController, AdmissionRequest
from coordinator.core.admission.tenants import (
    Tenant,
    TenantTable,
    TokenBucket,
    derive_cache_salt,
    hash_key,
)
from coordinator.core.admission.waiting_queue import QueueEntry, WaitingQueue
from coordinator.core.common.settings import QueueLimits
from coordinator.core.estimates.cost_model import CostModel, DecodeTimePredictor
from coordinator.core.estimates.workload import BacklogAhead, OutputLengthPredictor, ServiceRate
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.placement.disaggregation import LatencyEstimator
from coordinator.core.placement.node_loads import NodeLoads
from tests.unit.coordinator.core.brain_harness import DECODE, PREFILL, BrainHarness

CLASSES = ("premium", "standard", "batch")
GOLD, BULK = Principal("gold", "premium", 0), Principal("bulk", "standard", 1)


def tenant_table_of(*made: Tenant, reserve: float = 0.0, **waits: float) -> TenantTable:
    keys = tuple((hash_key(f"key of {one.name}".encode()), one.name) for one in made)
    return TenantTable(CLASSES, {one.name: one for one in made}, keys, reserve, waits)


class IdleNodes:
    """Nodes that have nothing to do and compute at once."""

    seconds = wait = 0.0

    def prefill_seconds(self, tokens: int) -> float:
        return self.seconds

    def decode_seconds(self, tenant: str, max_tokens: int) -> float:
        return self.seconds * max_tokens

    def node_wait_seconds(self, now: float) -> float:
        return self.wait

    def is_decode_full(self) -> bool:
        return False


class BusyNodes(IdleNodes):
    seconds, wait = 1.0, 2.0


def name(number: int) -> RequestId:
    return RequestId(f"r{number}")


# who they are


def test_api_key_finds_its_tenant_only() -> None:
    tenants = tenant_table_of(Tenant("a", "standard"), Tenant("b", "batch"))
    found = tenants.find_by_key(b"key of b")
    assert found is not None
    assert found.name == "b"
    assert tenants.find_by_key(b"key of c") is None
    assert TenantTable().find_by_key(b"") is None


@pytest.mark.parametrize(
    ("tenant_class", "priority", "level"),
    [
        ("premium", 0, 0),
        ("premium", 2, 2),
        ("standard", 0, 1),
        ("standard", -5, 1),
        ("batch", 0, 2),
        ("batch", 99, 2),
    ],
)
def test_priority_is_capped_by_the_class(tenant_class: str, priority: int, level: int) -> None:
    standing = tenant_table_of().make_principal(Tenant("t", tenant_class), priority)
    assert (standing.priority_level, standing.tenant_class) == (level, CLASSES[level])


def test_priority_is_ignored_without_tenants_file() -> None:
    assert TenantTable().make_principal(Tenant(), 7) == Principal()


def test_salts_differ_by_tenant() -> None:
    assert len({derive_cache_salt("a"), derive_cache_salt("b"), b""}) == 3


# limits


@given(
    asks=st.lists(st.tuples(st.floats(0, 2), st.floats(0.1, 30)), max_size=60),
    rate=st.floats(0.5, 20),
    burst=st.floats(1, 50),
)
def test_token_bucket_admits_rate_plus_one_burst(
    asks: list[tuple[float, float]], rate: float, burst: float
) -> None:
    bucket, now, paid = TokenBucket.make_full(rate, burst, 0.0), 0.0, 0.0
    for passed, amount in asks:
        now += passed
        if bucket.wait_seconds(now) == 0.0:
            assert paid < burst + rate * now + 1e-6, "nothing is let in on credit"
            bucket.charge_tokens(amount, now)
            paid += amount
        else:
            now += bucket.wait_seconds(now) + 1e-6
            assert bucket.wait_seconds(now) == 0.0


def test_debts_survive_a_reload() -> None:
    queue = WaitingQueue()
    admission = AdmissionController(queue, QueueLimits(10), IdleNodes())
    admission.reload_tenants(
        tenant_table_of(Tenant("bulk", "standard", tokens_per_second=10, token_burst=10)), 0.0
    )
    admission.admit_request(request(prompt=100), 0.0)
    admission.reload_tenants(
        tenant_table_of(Tenant("bulk", "standard", tokens_per_second=20, token_burst=10)), 0.0
    )
    with pytest.raises(Overloaded, match="tokens_per_second") as refused:
        admission.check_admission(BULK, AdmissionRequest(1, 60.0, 10), 0.0)
    assert refused.value.retry_after == pytest.approx(91 / 20)
    admission.check_admission(BULK, AdmissionRequest(1, 60.0, 10), 4.6)
    admission.reload_tenants(tenant_table_of(Tenant("other", "standard")), 5.0)
    admission.check_admission(BULK, AdmissionRequest(1, 60.0, 10), 5.0)


def request(prompt: int = 10, standing: Principal = BULK) -> Request:
    return Request(
        RequestId("r"), tuple(range(1, prompt + 1)), SamplingParams(4), 60.0, principal=standing
    )


# who is let in


def test_queue_places_are_bounded_by_class_and_tenant() -> None:
    queue = WaitingQueue()
    admission = AdmissionController(queue, QueueLimits(8), IdleNodes())
    admission.reload_tenants(
        tenant_table_of(
            Tenant("gold", "premium"), Tenant("bulk", "standard"), Tenant("meek", "standard")
        ),
        0.0,
    )
    for number in range(4):
        admission.check_admission(BULK, AdmissionRequest(1, 60.0, 10), 0.0)
        queue.add_request(name(number), admission.admit_request(request(), 0.0))
    with pytest.raises(Overloaded, match="its share of the free places is 4"):
        admission.check_admission(BULK, AdmissionRequest(1, 60.0, 10), 0.0)
    admission.check_admission(Principal("meek", "standard", 1), AdmissionRequest(2, 60.0, 10), 0.0)
    admission.check_admission(GOLD, AdmissionRequest(4, 60.0, 10), 0.0)


def test_predicted_wait_is_backlog_over_service_rate() -> None:
    rate = ServiceRate()
    assert rate.predict_wait_seconds(BacklogAhead(1e9, 1e9, True)) == 0.0
    rate.start_backlog(0.0)
    for second in range(0, 20):
        rate.record_placement(100, second / 2)
    assert rate.predict_wait_seconds(BacklogAhead(1000, 100, False)) == pytest.approx(5.0)
    assert rate.predict_wait_seconds(BacklogAhead(1000, 100, True)) == pytest.approx(50.0)
    rate.end_backlog()
    rate.start_backlog(1000.0)
    rate.record_placement(100, 1000.5)
    assert rate.predict_wait_seconds(BacklogAhead(1000, 100, False)) == pytest.approx(5.0), (
        "idle time says nothing"
    )


def test_wait_beyond_deadline_is_rejected_with_retry_after() -> None:
    queue = WaitingQueue()
    admission = AdmissionController(queue, QueueLimits(1000), IdleNodes())
    admission.reload_tenants(tenant_table_of(Tenant("bulk", "standard"), standard=3.0), 0.0)
    for number in range(60):
        queue.add_request(name(number), QueueEntry("bulk", 1, prompt_tokens=100))
    for number in range(10):
        queue.take_request(name(number), (number + 1) / 2)
    with pytest.raises(Overloaded, match="the limit is 3 s") as refused:
        admission.check_admission(BULK, AdmissionRequest(1, 60.0, 100), 5.0)
    assert refused.value.retry_after == pytest.approx(22.0)
    admission.check_admission(GOLD, AdmissionRequest(1, 60.0, 100), 5.0)


def test_wait_leaving_no_prefill_time_is_rejected_but_hopeless_prompt_is_admitted() -> None:
    admission = AdmissionController(WaitingQueue(), QueueLimits(1000), BusyNodes())
    admission.check_admission(BULK, AdmissionRequest(1, 3.1, 100), 0.0)
    with pytest.raises(Overloaded, match="would wait 2") as refused:
        admission.check_admission(BULK, AdmissionRequest(1, 2.9, 100), 0.0)
    assert refused.value.retry_after == pytest.approx(1.0)
    with pytest.raises(Overloaded, match="would wait 2"):
        admission.check_admission(BULK, AdmissionRequest(1, 12.9, 100, 10), 0.0)
    admission.check_admission(BULK, AdmissionRequest(1, 13.1, 100, 10), 0.0)
    admission.check_admission(BULK, AdmissionRequest(1, 0.9, 100), 0.0)


def test_latency_estimator_finds_hopeless_deadlines() -> None:
    costs = CostModel()
    prospects = LatencyEstimator(
        NodeRegistry(1.0, 1.0), NodeLoads(), costs, DecodeTimePredictor(OutputLengthPredictor())
    )
    assert prospects.find_deadline_error(10_000, 0, 0.001) is None, "nothing is known yet"
    for _ in range(50):
        costs.record_prefill(NodeName("p0"), 1000, 0, 1.0)
    assert isinstance(prospects.find_deadline_error(1000, 0, 0.4), DeadlineExceeded)
    assert prospects.find_deadline_error(1000, 0, 0.6) is None
    assert prospects.find_deadline_error(1000, 900, 0.4) is None, "a cache has most of it"


# in the brain


def test_reserve_keeps_blocks_for_first_class() -> None:
    world = BrainHarness(mode="colocated")
    tenants = tenant_table_of(Tenant("gold", "premium"), Tenant("bulk", "standard"), reserve=0.5)
    world.brain.reload_tenants(tenants, world.now)
    node = world.join_node("d0", DECODE, max_num_seqs=16, max_batched_tokens=512)  # 32 blocks
    for _ in range(5):
        submit(world, BULK, prompt=64)  # 5 blocks with room to grow
    assert world.brain.count_attempts(node) == 3
    for _ in range(3):
        submit(world, GOLD, prompt=64)
    assert world.brain.count_attempts(node) == 6
    assert world.brain.queued_requests == 2


def test_reserve_keeps_slots_for_first_class() -> None:
    world = BrainHarness(mode="colocated", max_queue=32)
    world.brain.reload_tenants(
        tenant_table_of(Tenant("gold", "premium"), Tenant("bulk", "standard"), reserve=0.25),
        world.now,
    )
    node = world.join_node("d0", DECODE, max_num_seqs=8, num_blocks=64)
    for _ in range(10):
        submit(world, BULK, prompt=4)
    assert world.brain.count_attempts(node) == 6
    for _ in range(3):
        submit(world, GOLD, prompt=4)
    assert world.brain.count_attempts(node) == 8


def test_reserve_does_not_block_requests_larger_than_remainder() -> None:
    world = BrainHarness(mode="colocated")
    world.brain.reload_tenants(
        tenant_table_of(Tenant("gold", "premium"), Tenant("bulk", "standard"), reserve=0.5),
        world.now,
    )
    node = world.join_node("d0", DECODE, max_model_len=1024)  # 32 blocks
    submit(world, BULK, prompt=400)
    assert world.brain.count_attempts(node) == 1


def test_burst_is_placed_as_prompts_are_computed() -> None:
    """Two steps' worth of prompts, so that a higher class may still pass the rest."""
    world = BrainHarness(mode="colocated", max_queue=32)
    world.brain.reload_tenants(
        tenant_table_of(Tenant("gold", "premium"), Tenant("bulk", "standard")), world.now
    )
    node = world.join_node("d0", DECODE, max_num_seqs=16, num_blocks=64)  # 64 tokens a step
    for _ in range(12):
        submit(world, BULK, prompt=32)
    assert world.brain.count_attempts(node) == 4
    gold = submit(world, GOLD, prompt=32)
    first = world.messages_to(node, DecodeOrder)[0].work.key
    world.report_token(node, first, 0)
    assert world.messages_to(node, DecodeOrder)[-1].work.key.request_id == gold
    assert world.brain.count_attempts(node) == 5


def test_class_is_sent_to_node_and_preemptor_is_charged() -> None:
    world = BrainHarness(mode="colocated")
    world.brain.reload_tenants(tenant_table_of(Tenant("bulk", "standard")), world.now)
    node = world.join_node("d0", DECODE)
    request = submit(world, BULK)
    (first,) = world.messages_to(node, DecodeOrder)
    assert first.work.request.principal == BULK
    assert first.work.prefill_charged_class == ""
    world.report_token(node, first.work.key, 0)
    world.send_from_node(node, AttemptFailed(first.work.key, Preempted("blocks"), "premium"))
    world.send_heartbeat(node, room=32)
    second = world.messages_to(node, DecodeOrder)[-1]
    assert second.work.prefill_charged_class == "premium"
    world.report_token(node, second.work.key, 1)
    world.cancel(request)
    assert world.brain.counters.requests == {("cancelled", "standard"): 1}
    assert world.end_event(request).tenant_class == "standard"


def test_long_prompts_leave_the_window_to_short_ones() -> None:
    world = BrainHarness(max_queue=32)
    prefill = world.join_node("p0", PREFILL, max_num_seqs=16, num_blocks=64)
    world.join_node("d0", DECODE, max_num_seqs=16, num_blocks=64)
    world.submit(prompt=200)
    for _ in range(8):
        world.submit(prompt=16)
    assert world.brain.count_attempts(prefill) == 5, "64 tokens of the long one, and 4 short ones"


def submit(world: BrainHarness, standing: Principal, prompt: int = 20) -> RequestId:
    request = world.make_request(prompt, standing=standing)
    world.effects += world.brain.submit_request(request, world.now)
    return request.id
