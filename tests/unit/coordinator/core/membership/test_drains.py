"""Taking a node out of service and putting it back."""

import pytest

from baton.cluster_link.messages import CancelOrder, DecodeOrder, DecodeStarted, TicketOrder
from baton.errors import NotFound, ServiceUnavailable
from baton.types import FinishReason, Incarnation, NodeName
from coordinator.core.common.effects import FinishedResult
from coordinator.core.membership.node_registry import (
    MAX_DRAINED_NODES,
    MIN_QUIET_REPORTS,
    DrainSet,
    NodeServiceState,
)
from tests.unit.coordinator.core.brain_harness import DECODE, PREFILL, BrainHarness

D0, D1, P0 = NodeName("d0"), NodeName("d1"), NodeName("p0")


@pytest.fixture
def world() -> BrainHarness:
    return BrainHarness()


@pytest.fixture
def nodes(world: BrainHarness) -> tuple[Incarnation, Incarnation, Incarnation]:
    return (
        world.join_node("p0", PREFILL),
        world.join_node("d0", DECODE),
        world.join_node("d1", DECODE),
    )


Nodes = tuple[Incarnation, Incarnation, Incarnation]


def drain(world: BrainHarness, name: NodeName, timeout: float | None = None) -> None:
    world.effects += world.brain.drain_node(name, timeout, world.now)


def service(world: BrainHarness, node: Incarnation) -> NodeServiceState:
    return world.brain.get_service_state(world.brain.node_registry.nodes[node])


def stream(world: BrainHarness, prefill: Incarnation, decode: Incarnation) -> None:
    key = world.last_attempt_key(decode)
    world.report_reserved(decode, key, prefill)
    world.report_prefill_ended(prefill, key)
    world.send_from_node(decode, DecodeStarted(key, 0, 0, 20))
    world.report_token(decode, key, 0)


def test_drained_node_gets_no_new_work_and_keeps_its_own(world: BrainHarness, nodes: Nodes) -> None:
    p0, d0, d1 = nodes
    request = world.submit(max_tokens=2)
    stream(world, p0, d0)
    drain(world, D0)
    assert service(world, d0) is NodeServiceState.DRAINING
    for _ in range(3):
        world.submit()
    assert (world.brain.count_attempts(d0), world.brain.count_attempts(d1)) == (1, 3)
    world.report_token(d0, world.last_attempt_key(d0), 1, finish=FinishReason.LENGTH)
    assert isinstance(world.end_event(request).result, FinishedResult)
    assert world.brain.counters.replaced_attempts == {}


def test_node_counts_as_drained_after_two_quiet_reports(world: BrainHarness, nodes: Nodes) -> None:
    """One heartbeat may have been on its way when the last work was called off, so it takes two,
    and nothing held."""
    p0, d0, _ = nodes
    world.submit(max_tokens=2)
    stream(world, p0, d0)
    drain(world, D0)
    for _ in range(MIN_QUIET_REPORTS):
        world.send_heartbeat(d0)
    assert service(world, d0) is NodeServiceState.DRAINING
    world.report_token(d0, world.last_attempt_key(d0), 1, finish=FinishReason.LENGTH)
    world.send_heartbeat(d0)
    assert service(world, d0) is NodeServiceState.DRAINING
    world.send_heartbeat(d0, blocks_quarantined=1)
    assert service(world, d0) is NodeServiceState.DRAINING
    world.send_heartbeat(d0)
    assert service(world, d0) is NodeServiceState.DRAINED


def test_draining_prefill_node_keeps_handoff_until_commit(
    world: BrainHarness, nodes: Nodes
) -> None:
    p0, d0, _ = nodes
    world.submit()
    drain(world, P0)
    key = world.last_attempt_key(d0)
    world.report_reserved(d0, key, p0)
    assert len(world.messages_to(p0, TicketOrder)) == 1
    world.report_prefill_ended(p0, key)
    assert world.brain.count_attempts(p0) == 1
    world.send_from_node(d0, DecodeStarted(key, 0, 0, 20))
    assert world.brain.count_attempts(p0) == 0
    world.send_heartbeat(p0, blocks_in_use=2)  # the sender still reads its source blocks
    world.send_heartbeat(p0, blocks_in_use=2)
    assert service(world, p0) is NodeServiceState.DRAINING
    world.send_heartbeat(p0)
    assert service(world, p0) is NodeServiceState.DRAINED


def test_drain_timeout_replaces_remaining_requests(world: BrainHarness, nodes: Nodes) -> None:
    p0, d0, d1 = nodes
    request = world.submit()
    stream(world, p0, d0)
    drain(world, D0, timeout=3.0)
    assert world.brain.next_tick_at() == world.now + 3.0
    world.advance(2.0)
    assert world.brain.count_attempts(d0) == 1
    world.advance(1.0)
    assert [cancel.reason.code for cancel in world.messages_to(d0, CancelOrder)] == ["drained"]
    [again] = world.messages_to(d1, DecodeOrder)
    assert again.work.emitted_token_ids == (7,)
    assert world.brain.counters.replaced_attempts == {"drained": 1}
    world.report_reserved(d1, again.work.key, p0)
    for index in (1, 2, 3):
        world.report_token(d1, again.work.key, index)
    assert world.emitted_tokens(request) == [7, 7, 7, 7]
    world.advance(10.0)
    assert len(world.messages_to(d0, CancelOrder)) == 1


def test_draining_costs_no_attempt() -> None:
    world = BrainHarness(max_attempts=1)
    p0, d0 = world.join_node("p0", PREFILL), world.join_node("d0", DECODE)
    request = world.submit()
    stream(world, p0, d0)
    drain(world, D0, timeout=0.0)
    assert world.end_events(request) == []
    world.join_node("d1", DECODE)
    assert world.brain.running_requests == 1


def test_restarted_node_stays_drained(world: BrainHarness, nodes: Nodes) -> None:
    _, d0, d1 = nodes
    drain(world, D0)
    world.lose_node(d0)
    again = world.join_node("d0", DECODE)
    for _ in range(3):
        world.submit()
    assert (world.brain.count_attempts(again), world.brain.count_attempts(d1)) == (0, 3)
    world.effects += world.brain.undrain_node(D0, world.now)
    assert service(world, again) is NodeServiceState.IN_SERVICE
    world.submit()
    assert world.brain.count_attempts(again) == 1


def test_last_decode_node_can_be_drained(world: BrainHarness, nodes: Nodes) -> None:
    running = world.submit()
    for name in (D0, D1):
        drain(world, name)
    assert world.brain.why_not_serving() == "there is no decode node but drained ones (d0, d1)"
    assert world.brain.why_no_prefill() == ""
    new = world.submit()
    world.advance(1.0)
    assert isinstance(world.end_error(new), ServiceUnavailable)
    assert world.end_events(running) == []
    world.effects += world.brain.undrain_node(D0, world.now)
    assert world.brain.why_not_serving() == ""


def test_decode_nodes_prefill_while_last_prefill_node_is_drained(
    world: BrainHarness, nodes: Nodes
) -> None:
    p0, _, _ = nodes
    world.submit()
    drain(world, P0)
    assert world.brain.why_not_serving() == ""
    assert world.brain.why_no_prefill() == "there is no prefill node but drained ones (p0)"
    request = world.submit()
    told = world.explain_request(request).attempts[0]
    assert (told.way, told.why, world.brain.count_attempts(p0)) == ("local", "no_prefill_node", 1)
    world.effects += world.brain.undrain_node(P0, world.now)
    assert world.brain.why_no_prefill() == ""
    world.submit()
    assert world.brain.count_attempts(p0) == 2


def test_unknown_node_names_are_not_found(world: BrainHarness, nodes: Nodes) -> None:
    for call in (
        lambda: drain(world, NodeName("x")),
        lambda: world.brain.undrain_node(NodeName("x"), world.now),
    ):
        with pytest.raises(NotFound, match="no node 'x': nodes are d0, d1, p0"):
            call()
    assert world.brain.undrain_node(D1, world.now) == []
    drain(world, D0)
    world.lose_node(nodes[1])
    assert world.brain.undrain_node(D0, world.now) == []  # drained, and away at this moment


def test_drained_names_are_bounded() -> None:
    drains = DrainSet()
    for number in range(MAX_DRAINED_NODES):
        drains.start_drain(NodeName(str(number)), None)
    drains.start_drain(NodeName("0"), 5.0)
    with pytest.raises(Exception, match="undrain some"):
        drains.start_drain(NodeName("x"), None)
    assert (drains.next_deadline(), drains.pop_due(5.0), drains.pop_due(5.0)) == (5.0, ["0"], [])
