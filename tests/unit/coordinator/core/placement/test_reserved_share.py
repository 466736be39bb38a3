"""What classes and long prompts leave to others on a node."""

from baton.cluster_link.messages import AttemptFailed, DecodeOrder
from baton.errors import Preempted
from baton.types import Principal, RequestId
from coordinator.core.admission.tenants import (
    Tenant,
)
from tests.unit.coordinator.core.admission.tenant_tables import BULK, GOLD, make_tenant_table
from tests.unit.coordinator.core.brain_harness import DECODE, PREFILL, BrainHarness


def test_reserve_keeps_blocks_for_first_class() -> None:
    world = BrainHarness(mode="colocated")
    tenants = make_tenant_table(Tenant("gold", "premium"), Tenant("bulk", "standard"), reserve=0.5)
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
        make_tenant_table(Tenant("gold", "premium"), Tenant("bulk", "standard"), reserve=0.25),
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
        make_tenant_table(Tenant("gold", "premium"), Tenant("bulk", "standard"), reserve=0.5),
        world.now,
    )
    node = world.join_node("d0", DECODE, max_model_len=1024)  # 32 blocks
    submit(world, BULK, prompt=400)
    assert world.brain.count_attempts(node) == 1


def test_burst_is_placed_as_prompts_are_computed() -> None:
    """Only prompts of two steps are placed at once, so that a higher class can still pass the
    others."""
    world = BrainHarness(mode="colocated", max_queue=32)
    world.brain.reload_tenants(
        make_tenant_table(Tenant("gold", "premium"), Tenant("bulk", "standard")), world.now
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
    world.brain.reload_tenants(make_tenant_table(Tenant("bulk", "standard")), world.now)
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
