"""What is on each node: free blocks, legs, closures after refusals."""

import pytest

from baton.types import AttemptKey, Incarnation, RequestId
from coordinator.core.membership.node_registry import NodeMember
from coordinator.core.placement.node_loads import NodeLoads
from simulator.node_messages import make_join_info
from tests.unit.coordinator.core.brain_harness import DECODE, PREFILL, BrainHarness


def key(number: int) -> AttemptKey:
    return AttemptKey(RequestId(f"r{number}"), 1, 0)


@pytest.fixture
def node() -> NodeMember:
    return NodeMember(make_join_info("d0", DECODE), Incarnation("d0"), 0.0, 0.0, b"")


@pytest.fixture
def loads(node: NodeMember) -> NodeLoads:
    loads = NodeLoads()
    loads.add_node(node.incarnation)
    return loads


def test_free_blocks_are_reported_less_unreported_legs(loads: NodeLoads, node: NodeMember) -> None:
    d = node.incarnation
    loads.add_leg(d, key(1), tokens=40, blocks=4)
    assert loads.get_view(node).free_blocks == 28
    loads.update_free_blocks(d, 32)  # sent before the node had heard of it
    assert loads.get_view(node).free_blocks == 28
    loads.acknowledge_leg(d, key(1))
    loads.update_free_blocks(d, 27)  # it has: and it took one block more than expected
    assert loads.get_view(node).free_blocks == 27
    loads.add_leg(d, key(2), tokens=20, blocks=2)
    assert loads.get_view(node).free_blocks == 25
    loads.remove_leg(d, key(1))
    assert loads.get_view(node).free_blocks == 29
    loads.remove_leg(d, key(2))
    assert loads.get_view(node).free_blocks == 31
    loads.update_free_blocks(d, 32)
    assert loads.get_view(node).free_blocks == 32


def test_remove_leg_is_idempotent(loads: NodeLoads, node: NodeMember) -> None:
    loads.add_leg(node.incarnation, key(1), 10, 1)
    loads.remove_leg(node.incarnation, key(1))
    loads.remove_leg(node.incarnation, key(1))
    loads.remove_leg(Incarnation("nobody"), key(1))
    assert loads.get_view(node).free_blocks == 32
    assert not loads.attempts_on(node.incarnation)


def test_refusal_closes_node_for_its_size_and_updates_free_blocks(
    loads: NodeLoads, node: NodeMember
) -> None:
    d = node.incarnation
    loads.close_node(d, blocks=4, needed=6, free_blocks=3)
    view = loads.get_view(node)
    assert (view.free_blocks, view.refused_from_blocks) == (3, 4)
    loads.update_free_blocks(d, 5)
    assert loads.get_view(node).refused_from_blocks == 4
    loads.update_free_blocks(d, 6)
    assert loads.get_view(node).refused_from_blocks is None


def test_the_smallest_refused_demand_stays_closed(loads: NodeLoads, node: NodeMember) -> None:
    loads.close_node(node.incarnation, blocks=2, needed=3)
    loads.close_node(node.incarnation, blocks=9, needed=9)
    assert loads.get_view(node).refused_from_blocks == 2


def test_only_leg_older_than_refusal_reopens_node(loads: NodeLoads, node: NodeMember) -> None:
    d = node.incarnation
    loads.add_leg(d, key(1), 10, 1)
    loads.close_node(d, blocks=2, needed=2)
    loads.add_leg(d, key(2), 10, 1)
    loads.remove_leg(d, key(2))
    assert loads.get_view(node).refused_from_blocks == 2
    loads.remove_leg(d, key(1))
    assert loads.get_view(node).refused_from_blocks is None


def test_prefill_view_counts_uncomputed_tokens() -> None:
    world = BrainHarness()
    p0 = world.join_node("p0", PREFILL)
    world.join_node("d0", DECODE)
    for _ in range(3):
        world.submit(prompt=60)
    assert (world.brain.count_attempts(p0), world.brain.queued_requests) == (2, 1)
    world.report_prefill_ended(p0, AttemptKey(RequestId("r1"), 1, 0))
    assert (world.brain.count_attempts(p0), world.brain.queued_requests) == (3, 0)


def test_decode_node_gets_at_most_max_num_seqs() -> None:
    world = BrainHarness(mode="colocated")
    d0 = world.join_node("d0", DECODE, max_num_seqs=2)
    requests = [world.submit() for _ in range(3)]
    assert (world.brain.count_attempts(d0), world.brain.queued_requests) == (2, 1)
    world.cancel(requests[0])
    assert (world.brain.count_attempts(d0), world.brain.queued_requests) == (2, 0)
