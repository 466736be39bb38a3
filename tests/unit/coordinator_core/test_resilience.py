"""What the request table does when things fail: the retry budget, breakers, who is to blame, and forward progress."""

import pytest

from baton.errors import Cancelled, Incomplete, InvalidRequest, OutOfMemory, PeerGone, Stale
from baton.types import FinishReason, Incarnation, RequestId
from coordinator.core import messages as m
from coordinator.core.breakers import FIRST_REST, TRIP, BreakerState
from coordinator.core.notes import APART, FAILED
from coordinator.core.record import RequestState
from coordinator.core.retry_budget import FLOOR, WINDOW
from coordinator.core.settings import LONGEST_REST
from tests.unit.coordinator_core.world import DECODE, PREFILL, World

FAR = 1000.0  # seconds: nobody's deadline


def wide(max_queue: int = 500, max_attempts: int = 1000) -> tuple[World, Incarnation, Incarnation]:
    """A world with room for many."""
    world = World(max_queue=max_queue, max_attempts=max_attempts)
    room = {"max_num_seqs": 500, "num_blocks": 2000, "max_batched_tokens": 8192}
    return world, world.join("p0", PREFILL, **room), world.join("d0", DECODE, **room)


def placed_keys(world: World, node: Incarnation) -> list[m.Submit]:
    return world.sent(node, m.Submit)


# the retry budget


def test_retries_are_held_to_a_share_of_what_comes_in() -> None:
    """Every attempt fails. Without the budget each request would be tried again and again."""
    world, _, d0 = wide()
    offered = 400
    for _ in range(offered):
        world.submit(timeout=FAR)
    seen = 0
    for _ in range(20):  # 10 s
        for order in placed_keys(world, d0)[seen:]:
            seen += 1
            world.fail(d0, order.work.key, OutOfMemory("none left"))
        world.advance(0.5)
    assert offered <= seen <= 1.2 * offered
    brain = world.brain
    assert brain.retries.held > 0
    assert brain.queued + brain.running == offered, "they wait: nobody has failed"
    assert [effect for effect in world.effects if isinstance(effect, m.End)] == []
    before = len(placed_keys(world, d0))
    world.advance(2 * WINDOW)
    world.advance(LONGEST_REST)
    assert before < len(placed_keys(world, d0)) <= before + FLOOR, "the load has gone, the floor is left"


def exhaust(world: World, node: Incarnation) -> RequestId:
    """Spend the budget on requests that fail and go; returns one that is held back."""
    while True:
        request = world.submit(timeout=FAR)
        world.fail(node, world.key(node), OutOfMemory("none left"))
        if world.brain.retries.held:
            return request
        world.cancel(request)


def test_who_was_held_back_is_told_so() -> None:
    world, _, d0 = wide()
    request = exhaust(world, d0)
    assert world.brain.state(request) is RequestState.QUEUED
    assert (world.brain.queued, world.brain.retries.held_back) == (1, 1)
    began, due = world.now, world.brain.next_due()
    assert due is not None
    assert due <= began + WINDOW
    world.advance(WINDOW)
    assert world.brain.state(request) is RequestState.PLACED
    attempt = world.brain.explain(request, world.now).attempts[-1]
    assert attempt.held_back == pytest.approx(world.now - began)
    assert [one.because for one in attempt.considered] == [FAILED, FAILED]


def test_new_requests_bring_new_budget() -> None:
    world, _, d0 = wide()
    request = exhaust(world, d0)
    while world.brain.state(request) is RequestState.QUEUED:
        world.submit(timeout=FAR)
    assert world.brain.retries.held == 0


def test_the_residents_of_a_dead_node_are_exempt() -> None:
    world, p0, d0 = wide()
    exhaust(world, d0)
    before = world.brain.retries.held
    crowd = [world.submit(timeout=FAR) for _ in range(40)]
    d1 = world.join("d1", DECODE, max_num_seqs=500, num_blocks=2000)
    world.gone(d0)
    assert {order.work.request.id for order in placed_keys(world, d1)} >= set(crowd)
    assert before == 1
    assert world.brain.retries.held == 0, "it had failed on the node that turned out to be dead"
    assert world.brain.placed_on(p0) >= len(crowd)


def test_as_many_are_held_back_as_may_wait() -> None:
    world, _, d0 = wide(max_queue=5)
    exhaust(world, d0)
    failed = []
    for _ in range(6):
        failed.append(world.submit(timeout=FAR))
        world.fail(d0, world.key(d0), OutOfMemory("none left"))
    held = [request for request in failed if world.brain.state(request) is RequestState.QUEUED]
    assert len(held) == 4
    assert [world.error(request).code for request in failed if request not in held] == ["out_of_memory"] * 2


def test_one_may_end_while_it_is_held_back() -> None:
    world, _, d0 = wide()
    request = exhaust(world, d0)
    world.cancel(request)
    assert isinstance(world.error(request), Cancelled)
    assert world.brain.queued == 0
    assert world.advance(2 * WINDOW) == []


# breakers


@pytest.fixture
def world() -> World:
    return World(max_attempts=50)


def serve(world: World, prefill: Incarnation, decode: Incarnation) -> None:
    key = world.key(decode)
    world.reserve(decode, key, prefill)
    world.prefill_ended(prefill, key)
    world.token(decode, key, 0, finish=FinishReason.STOP)


def changes(world: World) -> list[BreakerState]:
    return [effect.state for effect in world.effects if isinstance(effect, m.PairChanged)]


def trip(world: World, decode: Incarnation) -> RequestId:
    """One request, whose hand-offs fail until the pair is kept apart."""
    request = world.submit(timeout=FAR)
    while BreakerState.OPEN not in changes(world):
        if not world.placed():
            world.advance(0.05)
            continue
        world.fail(decode, world.key(decode), Incomplete("slabs are missing"))
    return request


def test_hand_offs_that_fail_open_the_pair_and_a_probe_closes_it(world: World) -> None:
    p0, d0 = world.join("p0", PREFILL), world.join("d0", DECODE)
    request = trip(world, d0)
    assert world.brain.counters.replaced == {"incomplete": TRIP}
    assert world.brain.breakers.apart == {(p0, d0)}
    other = world.submit(timeout=FAR)
    world.advance(FIRST_REST / 2)
    assert world.placed() == 0, "nobody else can serve them: they wait"
    world.advance(FIRST_REST)
    assert world.placed() == 2, "the probe, both legs of it"
    probe = request if world.brain.state(request) is RequestState.PLACED else other
    assert world.brain.explain(probe, world.now).attempts[-1].probe
    serve(world, p0, d0)
    assert changes(world) == [BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED]
    world.advance(LONGEST_REST)
    assert world.placed() == 2, "and now the other"
    assert world.brain.counters.breakers == {"open": 1, "half_open": 1, "closed": 1}


def test_each_of_the_two_goes_on_with_others(world: World) -> None:
    p0, d0 = world.join("p0", PREFILL), world.join("d0", DECODE)
    request = trip(world, d0)
    p1 = world.join("p1", PREFILL)
    world.advance(LONGEST_REST / 4)
    assert world.brain.placed_on(p0) == 0
    assert (world.brain.placed_on(p1), world.brain.placed_on(d0)) == (1, 1)
    because = {one.node: one.because for one in world.brain.explain(request, world.now).attempts[-1].considered}
    assert because["p0"] == APART
    d1 = world.join("d1", DECODE)
    world.submit(timeout=FAR)
    assert (world.brain.placed_on(p0), world.brain.placed_on(d1)) == (1, 1)


def test_a_probe_whose_client_goes_away_makes_way(world: World) -> None:
    world.join("p0", PREFILL)
    d0 = world.join("d0", DECODE)
    request = trip(world, d0)
    world.advance(FIRST_REST)
    world.advance(LONGEST_REST)
    assert world.brain.state(request) is RequestState.PLACED
    waiting = world.submit(timeout=FAR)
    assert world.brain.state(waiting) is RequestState.QUEUED
    world.cancel(request)
    assert world.brain.state(waiting) is RequestState.PLACED
    assert world.brain.explain(waiting, world.now).attempts[-1].probe


def test_what_clients_do_wrong_counts_against_nobody(world: World) -> None:
    """Nor does what says nothing about the link: a refusal, a step that fails, a message of another life."""
    p0, d0 = world.join("p0", PREFILL), world.join("d0", DECODE)
    for number in range(1000):
        request = world.submit(timeout=FAR)
        if number % 2:
            world.fail(p0, world.key(p0), InvalidRequest("token 5 is bad"))
        else:
            world.cancel(request)
        assert world.ends(request)
    for error in (OutOfMemory("none left"), Stale("of another attempt")):
        for _ in range(TRIP + 1):
            request = world.submit(timeout=FAR)
            world.fail(d0, world.key(d0), error)
            world.cancel(request)
    for _ in range(TRIP + 1):
        request = world.submit(timeout=FAR)
        world.say(d0, m.Refused(world.key(d0), 3, 2))
        world.cancel(request)
        world.beat(d0)
    assert changes(world) == []
    world.submit(timeout=FAR)
    assert (world.brain.placed_on(p0), world.brain.placed_on(d0)) == (1, 1)


def test_a_pair_is_forgotten_with_either_node(world: World) -> None:
    world.join("p0", PREFILL)
    d0 = world.join("d0", DECODE)
    request = trip(world, d0)
    world.gone(d0)
    assert world.brain.breakers.apart == frozenset()
    world.join("d0", DECODE)
    world.advance(LONGEST_REST)
    assert world.brain.state(request) is RequestState.PLACED


def test_full_hits_prove_no_link(world: World) -> None:
    """Decode held the prompt: nothing was handed over."""
    p0, d0 = world.join("p0", PREFILL), world.join("d0", DECODE)
    for number in range(TRIP):
        request = world.submit(timeout=FAR)
        world.fail(p0, world.key(p0), PeerGone("no answer"))
        world.cancel(request)
        if number < TRIP - 1:
            world.submit(timeout=FAR)
            world.reserve(d0, world.key(d0), None)
            world.token(d0, world.key(d0), 0, finish=FinishReason.STOP)
    assert changes(world) == [BreakerState.OPEN]


# forward progress


def test_only_getting_further_is_progress(world: World) -> None:
    p0, d0 = world.join("p0", PREFILL), world.join("d0", DECODE)
    world.advance(500.0)
    assert world.brain.stood_still(world.now) == 0.0, "nobody is here"
    request = world.submit(timeout=FAR)
    assert world.brain.stood_still(world.now) == 0.0
    for _ in range(10):  # tried again and again, and no further
        world.advance(3.0)
        if world.brain.placed_on(d0):
            world.reserve(d0, world.key(d0), p0)
            world.fail(d0, world.key(d0), OutOfMemory("none left"))
    assert world.brain.state(request) in (RequestState.PLACED, RequestState.QUEUED)
    assert world.brain.stood_still(world.now) > 20.0
    if not world.brain.placed_on(d0):
        world.advance(LONGEST_REST)
    world.reserve(d0, world.key(d0), p0)
    world.prefill_ended(p0, world.key(p0))
    world.token(d0, world.key(d0), 0)
    assert world.brain.stood_still(world.now) == 0.0
    world.cancel(request)
    world.advance(100.0)
    assert world.brain.stood_still(world.now) == 0.0


def test_waiting_for_room_stands_still_too(world: World) -> None:
    world.join("p0", PREFILL)
    d0 = world.join("d0", DECODE)
    world.submit(timeout=FAR)
    world.say(d0, m.Refused(world.key(d0), needed=5, free=2))
    world.advance(20.0)
    assert (world.brain.running, world.brain.queued) == (0, 1)
    assert world.brain.stood_still(world.now) == pytest.approx(20.0)
