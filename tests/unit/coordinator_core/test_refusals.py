"""Nodes that refuse a request, or preempt it: it waits for room, and counts no failure."""

from baton.errors import (
    Preempted,
    Stalled,
)
from baton.types import Incarnation
from coordinator.core import messages as m
from coordinator.core.record import RequestState
from tests.unit.coordinator_core.world import World


def test_a_refusal_waits_for_room_and_counts_no_failure(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit()
    for _ in range(10):
        world.say(d0, m.Refused(world.key(d0), needed=5, free=2))
        assert world.brain.state(request) is RequestState.QUEUED
        assert world.beat(d0, room=4) == []
        assert world.beat(d0, room=5)  # placed
    assert world.ends(request) == []
    assert len(world.sent(p0, m.Cancel)) == 10


def test_a_node_that_refused_takes_smaller_requests(world: World, p0: Incarnation, d0: Incarnation) -> None:
    big = world.submit(prompt=150)
    world.say(d0, m.Refused(world.key(d0), needed=10, free=6))
    small = world.submit(prompt=20)
    assert world.brain.state(big) is RequestState.QUEUED
    assert world.brain.state(small) is RequestState.PLACED


def test_the_end_of_an_older_attempt_reopens_the_node(world: World, p0: Incarnation, d0: Incarnation) -> None:
    first = world.submit(prompt=100)
    old = world.key(d0)
    world.reserve(d0, old, p0)
    world.prefill_ended(p0, old)
    second = world.submit(prompt=100)
    world.say(d0, m.Refused(world.key(d0), needed=8, free=2))
    assert world.brain.state(second) is RequestState.QUEUED
    world.cancel(first)
    assert world.brain.state(second) is RequestState.PLACED


def test_two_refusing_nodes_do_not_reopen_each_other(world: World, p0: Incarnation, d0: Incarnation) -> None:
    """Each refusal cancels the other leg; that end must not count as room."""
    for _ in range(3):
        world.submit(prompt=40)
    for _ in range(20):
        if not world.brain.placed_on(d0):
            break
        key = world.key(d0)
        world.fail(p0, key, Preempted("speculative")) if key[0] == "r1" else world.say(d0, m.Refused(key, 2, 1))
    assert len(world.sent(d0, m.Submit)) < 10
    assert world.brain.queued > 0


def test_preemption_waits_too(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit()
    for count in range(5):
        key = world.key(d0)
        world.reserve(d0, key, p0)
        world.fail(d0, key, Preempted("an older sequence needs the blocks"))
        assert world.brain.state(request) is RequestState.QUEUED, count
        world.beat(d0)
    assert world.brain.counters.replaced == {"preempted": 5}
    assert world.brain.state(request) is RequestState.PLACED


def test_decode_that_does_not_answer_is_left(world: World, p0: Incarnation, d0: Incarnation) -> None:
    world.submit()
    world.advance(14.9)
    assert world.brain.counters.replaced == {}
    world.advance(0.2)
    assert world.brain.counters.replaced == {Stalled.code: 1}
    assert world.key(d0).attempt == 2
