"""Nodes that refuse a request, or preempt it: it waits for room, and counts no failure."""

from baton.cluster_link.messages import CancelOrder, DecodeOrder, ReservationRefused
from baton.errors import (
    NodeStalled,
    Preempted,
)
from baton.types import Incarnation
from coordinator.core.requests.record import RequestState
from tests.unit.coordinator.core.brain_harness import BrainHarness


def test_refusal_waits_for_room_without_counting_failure(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit()
    for _ in range(10):
        world.send_from_node(
            d0, ReservationRefused(world.last_attempt_key(d0), needed_blocks=5, free_blocks=2)
        )
        assert world.brain.get_request_state(request) is RequestState.QUEUED
        assert world.send_heartbeat(d0, room=4) == []
        assert world.send_heartbeat(d0, room=5)  # placed
    assert world.end_events(request) == []
    assert len(world.messages_to(p0, CancelOrder)) == 10


def test_a_node_that_refused_takes_smaller_requests(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    big = world.submit(prompt=150)
    world.send_from_node(
        d0, ReservationRefused(world.last_attempt_key(d0), needed_blocks=10, free_blocks=6)
    )
    small = world.submit(prompt=20)
    assert world.brain.get_request_state(big) is RequestState.QUEUED
    assert world.brain.get_request_state(small) is RequestState.PLACED


def test_end_of_older_attempt_reopens_node(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    first = world.submit(prompt=100)
    old = world.last_attempt_key(d0)
    world.report_reserved(d0, old, p0)
    world.report_prefill_ended(p0, old)
    second = world.submit(prompt=100)
    world.send_from_node(
        d0, ReservationRefused(world.last_attempt_key(d0), needed_blocks=8, free_blocks=2)
    )
    assert world.brain.get_request_state(second) is RequestState.QUEUED
    world.cancel(first)
    assert world.brain.get_request_state(second) is RequestState.PLACED


def test_two_refusing_nodes_do_not_reopen_each_other(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    """Each refusal cancels the other leg; that end must not count as room."""
    for _ in range(3):
        world.submit(prompt=40)
    for _ in range(20):
        if not world.brain.count_attempts(d0):
            break
        key = world.last_attempt_key(d0)
        world.report_failure(p0, key, Preempted("speculative")) if key[
            0
        ] == "r1" else world.send_from_node(d0, ReservationRefused(key, 2, 1))
    assert len(world.messages_to(d0, DecodeOrder)) < 10
    assert world.brain.queued_requests > 0


def test_preemption_waits_for_room_without_counting_failure(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit()
    for count in range(5):
        key = world.last_attempt_key(d0)
        world.report_reserved(d0, key, p0)
        world.report_failure(d0, key, Preempted("an older sequence needs the blocks"))
        assert world.brain.get_request_state(request) is RequestState.QUEUED, count
        world.send_heartbeat(d0)
    assert world.brain.counters.replaced_attempts == {"preempted": 5}
    assert world.brain.get_request_state(request) is RequestState.PLACED


def test_unanswered_submit_moves_request_to_other_node(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    world.submit()
    world.advance(14.9)
    assert world.brain.counters.replaced_attempts == {}
    world.advance(0.2)
    assert world.brain.counters.replaced_attempts == {NodeStalled.code: 1}
    assert world.last_attempt_key(d0).attempt_number == 2
