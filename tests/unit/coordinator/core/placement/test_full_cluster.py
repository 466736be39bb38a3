"""Placement while every decode node has as many sequences as it can hold."""

from collections.abc import Sequence

from baton.cluster_link.messages import DecodeOrder, PrefillOrder
from coordinator.core.estimates.cost_model import CostModel
from coordinator.core.placement.interface import NodeChoice, PlacementContext
from coordinator.core.placement.node_loads import NodeView, PlacementDemand
from coordinator.core.placement.policies import LeastLoadedPolicy
from tests.unit.coordinator.core.brain_harness import DECODE, PREFILL, BrainHarness


class CountingPolicy(LeastLoadedPolicy):
    choose_calls = 0

    def choose_nodes(
        self, demand: PlacementDemand, nodes: Sequence[NodeView], outlook: PlacementContext
    ) -> NodeChoice | None:
        self.choose_calls += 1
        return super().choose_nodes(demand, nodes, outlook)


def test_full_decode_nodes_skip_policy_calls() -> None:
    """Every heartbeat and every end of a leg leads to another pass over the queue."""
    policy = CountingPolicy()
    world = BrainHarness(placement=policy)
    world.join_node("p0", PREFILL)
    decode = world.join_node("d0", DECODE, max_num_seqs=1)
    first = world.submit()
    waiting = [world.submit() for _ in range(3)]
    assert policy.choose_calls == 1
    for _ in range(5):
        world.send_heartbeat(decode)
    assert policy.choose_calls == 1
    world.cancel(first)
    assert policy.choose_calls == 2
    assert len(world.messages_to(decode, DecodeOrder)) == 2
    assert world.last_attempt_key(decode).request_id == waiting[0]


def test_single_token_request_needs_no_decode_slot() -> None:
    world = BrainHarness()
    prefill = world.join_node("p0", PREFILL)
    world.join_node("d0", DECODE, max_num_seqs=1)
    world.submit()
    world.submit()
    alone = world.submit(max_tokens=1)
    assert world.last_attempt_key(prefill).request_id == alone


def test_can_prefill_within_matches_least_prefill() -> None:
    costs = CostModel()
    assert costs.can_prefill_within(100, 0, 1e-6), "nobody has reported: who knows"
    assert not costs.can_prefill_within(100, 0, 0.0)
    for number, seconds in enumerate((0.1, 0.2, 0.4)):
        for _ in range(50):
            costs.record_prefill(f"p{number}", 100, 0, seconds)  # type: ignore[arg-type]
    least = costs.fastest_prefill_seconds(100, 0)
    assert costs.can_prefill_within(100, 0, least * 1.01)
    assert not costs.can_prefill_within(100, 0, least)


def test_followers_of_full_holder_prefill_once_on_another_node() -> None:
    world = BrainHarness(max_queue=16)
    prefill = world.join_node("p0", PREFILL, max_num_seqs=16, max_batched_tokens=1024)
    full = world.join_node("d0", DECODE, max_num_seqs=3)
    first = world.make_request()
    world.submit_all(
        first,
        *(world.make_request(after=first.id, choice=number) for number in range(1, 8)),
    )
    roomy = world.join_node("d1", DECODE, max_num_seqs=8)
    world.report_reserved(full, world.last_attempt_key(full), prefill)
    world.report_token(full, world.last_attempt_key(full), 0)
    assert len(world.messages_to(full, DecodeOrder)) == 3
    assert [order.kv_writer is not None for order in world.messages_to(roomy, DecodeOrder)] == [
        True
    ], "the others wait for it"
    world.report_reserved(roomy, world.last_attempt_key(roomy), prefill)
    world.report_token(roomy, world.last_attempt_key(roomy), 0)
    assert [order.kv_writer is not None for order in world.messages_to(roomy, DecodeOrder)] == [
        True,
        False,
        False,
        False,
        False,
    ]
    assert len(world.messages_to(prefill, PrefillOrder)) == 2, "one for each cache"
    assert not world.brain.parts.waiting.followers._by_leader
