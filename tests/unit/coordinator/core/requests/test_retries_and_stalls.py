"""Failures in the request table: the retry budget, breakers, nodes to avoid, and progress."""

import pytest

from baton.cluster_link.messages import DecodeOrder, ReservationRefused
from baton.errors import (
    Cancelled,
    IncompleteTransfer,
    InvalidRequest,
    OutOfMemory,
    PeerUnreachable,
    StaleMessage,
)
from baton.types import FinishReason, Incarnation, RequestId
from coordinator.core.admission.admission_controller import MIN_RETRIES, RETRY_WINDOW_SECONDS
from coordinator.core.common.breaker_state import BreakerState
from coordinator.core.common.effects import BreakerChanged, EndRequest
from coordinator.core.common.settings import MAX_BACKOFF_SECONDS
from coordinator.core.placement.breakers import (
    FAILURES_TO_OPEN,
    FIRST_COOLDOWN_SECONDS,
)
from coordinator.core.placement.interface import BLOCKED_PAIR, FAILED_BEFORE
from coordinator.core.requests.record import RequestState
from tests.unit.coordinator.core.brain_harness import DECODE, PREFILL, BrainHarness

FAR = 1000.0  # seconds: nobody's deadline


def wide(
    max_queue: int = 500, max_attempts: int = 1000
) -> tuple[BrainHarness, Incarnation, Incarnation]:
    """Return a cluster with room for many requests."""
    world = BrainHarness(max_queue=max_queue, max_attempts=max_attempts)
    room = {"max_num_seqs": 500, "num_blocks": 2000, "max_batched_tokens": 8192}
    return world, world.join_node("p0", PREFILL, **room), world.join_node("d0", DECODE, **room)


def placed_keys(world: BrainHarness, node: Incarnation) -> list[DecodeOrder]:
    return world.messages_to(node, DecodeOrder)


# the retry budget


def test_retries_are_limited_to_share_of_offered_requests() -> None:
    """Every attempt fails. Without the budget each request would be retried again and again."""
    world, _, d0 = wide()
    offered = 400
    for _ in range(offered):
        world.submit(timeout=FAR)
    seen = 0
    for _ in range(20):  # 10 s
        for order in placed_keys(world, d0)[seen:]:
            seen += 1
            world.report_failure(d0, order.work.key, OutOfMemory("none left"))
        world.advance(0.5)
    assert offered <= seen <= 1.2 * offered
    brain = world.brain
    assert brain.retries.held_back_count > 0
    assert brain.queued_requests + brain.running_requests == offered, "they wait: nobody has failed"
    assert [effect for effect in world.effects if isinstance(effect, EndRequest)] == []
    before = len(placed_keys(world, d0))
    world.advance(2 * RETRY_WINDOW_SECONDS)
    world.advance(MAX_BACKOFF_SECONDS)
    assert before < len(placed_keys(world, d0)) <= before + MIN_RETRIES, (
        "the load has gone, the floor is left"
    )


def exhaust(world: BrainHarness, node: Incarnation) -> RequestId:
    """Use up the retry budget with failing requests; return one that is held back."""
    while True:
        request = world.submit(timeout=FAR)
        world.report_failure(node, world.last_attempt_key(node), OutOfMemory("none left"))
        if world.brain.retries.held_back_count:
            return request
        world.cancel(request)


def test_held_back_time_is_explained() -> None:
    world, _, d0 = wide()
    request = exhaust(world, d0)
    assert world.brain.get_request_state(request) is RequestState.QUEUED
    assert (world.brain.queued_requests, world.brain.retries.held_back_total) == (1, 1)
    began, due = world.now, world.brain.next_tick_at()
    assert due is not None
    assert due <= began + RETRY_WINDOW_SECONDS
    world.advance(RETRY_WINDOW_SECONDS)
    assert world.brain.get_request_state(request) is RequestState.PLACED
    attempt = world.explain_request(request).attempts[-1]
    assert attempt.held_back == pytest.approx(world.now - began)
    assert [one.because for one in attempt.considered] == [FAILED_BEFORE, FAILED_BEFORE]


def test_new_requests_replenish_retry_budget() -> None:
    world, _, d0 = wide()
    request = exhaust(world, d0)
    while world.brain.get_request_state(request) is RequestState.QUEUED:
        world.submit(timeout=FAR)
    assert world.brain.retries.held_back_count == 0


def test_requests_of_lost_node_are_exempt_from_retry_budget() -> None:
    world, p0, d0 = wide()
    exhaust(world, d0)
    before = world.brain.retries.held_back_count
    crowd = [world.submit(timeout=FAR) for _ in range(40)]
    d1 = world.join_node("d1", DECODE, max_num_seqs=500, num_blocks=2000)
    world.lose_node(d0)
    assert {order.work.request.id for order in placed_keys(world, d1)} >= set(crowd)
    assert before == 1
    assert world.brain.retries.held_back_count == 0, (
        "it had failed on the node that turned out to be dead"
    )
    assert world.brain.count_attempts(p0) >= len(crowd)


def test_held_back_requests_are_bounded_by_max_queue() -> None:
    world, _, d0 = wide(max_queue=5)
    exhaust(world, d0)
    failed = []
    for _ in range(6):
        failed.append(world.submit(timeout=FAR))
        world.report_failure(d0, world.last_attempt_key(d0), OutOfMemory("none left"))
    held = [
        request
        for request in failed
        if world.brain.get_request_state(request) is RequestState.QUEUED
    ]
    assert len(held) == 4
    assert [world.end_error(request).code for request in failed if request not in held] == [
        "out_of_memory"
    ] * 2


def test_request_may_end_while_held_back() -> None:
    world, _, d0 = wide()
    request = exhaust(world, d0)
    world.cancel(request)
    assert isinstance(world.end_error(request), Cancelled)
    assert world.brain.queued_requests == 0
    assert world.advance(2 * RETRY_WINDOW_SECONDS) == []


# breakers


@pytest.fixture
def world() -> BrainHarness:
    return BrainHarness(max_attempts=50)


def serve(world: BrainHarness, prefill: Incarnation, decode: Incarnation) -> None:
    key = world.last_attempt_key(decode)
    world.report_reserved(decode, key, prefill)
    world.report_prefill_ended(prefill, key)
    world.report_token(decode, key, 0, finish=FinishReason.STOP)


def changes(world: BrainHarness) -> list[BreakerState]:
    return [effect.state for effect in world.effects if isinstance(effect, BreakerChanged)]


def trip(world: BrainHarness, decode: Incarnation) -> RequestId:
    """Let hand-offs of one request fail until the breaker of the pair opens."""
    request = world.submit(timeout=FAR)
    while BreakerState.OPEN not in changes(world):
        if not world.count_placed():
            world.advance(0.05)
            continue
        world.report_failure(
            decode, world.last_attempt_key(decode), IncompleteTransfer("slabs are missing")
        )
    return request


def test_failed_handoffs_open_breaker_and_probe_closes_it(world: BrainHarness) -> None:
    p0, d0 = world.join_node("p0", PREFILL), world.join_node("d0", DECODE)
    request = trip(world, d0)
    assert world.brain.counters.replaced_attempts == {"incomplete": FAILURES_TO_OPEN}
    assert world.brain.breakers.blocked_pairs == {(p0, d0)}
    other = world.submit(timeout=FAR)
    world.advance(FIRST_COOLDOWN_SECONDS / 2)
    assert world.count_placed() == 0, "nobody else can serve them: they wait"
    world.advance(FIRST_COOLDOWN_SECONDS)
    assert world.count_placed() == 2, "the probe, both legs of it"
    probe = request if world.brain.get_request_state(request) is RequestState.PLACED else other
    assert world.explain_request(probe).attempts[-1].probe
    serve(world, p0, d0)
    assert changes(world) == [BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED]
    world.advance(MAX_BACKOFF_SECONDS)
    assert world.count_placed() == 2, "and now the other"
    assert world.brain.counters.breaker_changes == {"open": 1, "half_open": 1, "closed": 1}


def test_nodes_of_open_breaker_serve_with_other_nodes(world: BrainHarness) -> None:
    p0, d0 = world.join_node("p0", PREFILL), world.join_node("d0", DECODE)
    request = trip(world, d0)
    p1 = world.join_node("p1", PREFILL)
    world.advance(MAX_BACKOFF_SECONDS / 4)
    assert world.brain.count_attempts(p0) == 0
    assert (world.brain.count_attempts(p1), world.brain.count_attempts(d0)) == (1, 1)
    because = {
        one.node: one.because for one in world.explain_request(request).attempts[-1].considered
    }
    assert because["p0"] == BLOCKED_PAIR
    d1 = world.join_node("d1", DECODE)
    world.submit(timeout=FAR)
    assert (world.brain.count_attempts(p0), world.brain.count_attempts(d1)) == (1, 1)


def test_cancelled_probe_lets_another_probe_through(world: BrainHarness) -> None:
    world.join_node("p0", PREFILL)
    d0 = world.join_node("d0", DECODE)
    request = trip(world, d0)
    world.advance(FIRST_COOLDOWN_SECONDS)
    world.advance(MAX_BACKOFF_SECONDS)
    assert world.brain.get_request_state(request) is RequestState.PLACED
    waiting = world.submit(timeout=FAR)
    assert world.brain.get_request_state(waiting) is RequestState.QUEUED
    world.cancel(request)
    assert world.brain.get_request_state(waiting) is RequestState.PLACED
    assert world.explain_request(waiting).attempts[-1].probe


@pytest.mark.slow
def test_client_errors_do_not_count_against_breaker(world: BrainHarness) -> None:
    """Nor do refusals, failed steps and stale messages, which say nothing about the link."""
    p0, d0 = world.join_node("p0", PREFILL), world.join_node("d0", DECODE)
    for number in range(1000):
        request = world.submit(timeout=FAR)
        if number % 2:
            world.report_failure(p0, world.last_attempt_key(p0), InvalidRequest("token 5 is bad"))
        else:
            world.cancel(request)
        assert world.end_events(request)
    for error in (OutOfMemory("none left"), StaleMessage("of another attempt")):
        for _ in range(FAILURES_TO_OPEN + 1):
            request = world.submit(timeout=FAR)
            world.report_failure(d0, world.last_attempt_key(d0), error)
            world.cancel(request)
    for _ in range(FAILURES_TO_OPEN + 1):
        request = world.submit(timeout=FAR)
        world.send_from_node(d0, ReservationRefused(world.last_attempt_key(d0), 3, 2))
        world.cancel(request)
        world.send_heartbeat(d0)
    assert changes(world) == []
    world.submit(timeout=FAR)
    assert (world.brain.count_attempts(p0), world.brain.count_attempts(d0)) == (1, 1)


def test_breaker_is_forgotten_with_either_node(world: BrainHarness) -> None:
    world.join_node("p0", PREFILL)
    d0 = world.join_node("d0", DECODE)
    request = trip(world, d0)
    world.lose_node(d0)
    assert world.brain.breakers.blocked_pairs == frozenset()
    world.join_node("d0", DECODE)
    world.advance(MAX_BACKOFF_SECONDS)
    assert world.brain.get_request_state(request) is RequestState.PLACED


def test_full_prefix_hits_do_not_close_breaker(world: BrainHarness) -> None:
    """Decode had the prompt cached, so nothing was handed over."""
    p0, d0 = world.join_node("p0", PREFILL), world.join_node("d0", DECODE)
    for number in range(FAILURES_TO_OPEN):
        request = world.submit(timeout=FAR)
        world.report_failure(p0, world.last_attempt_key(p0), PeerUnreachable("no answer"))
        world.cancel(request)
        if number < FAILURES_TO_OPEN - 1:
            world.submit(timeout=FAR)
            world.report_reserved(d0, world.last_attempt_key(d0), None)
            world.report_token(d0, world.last_attempt_key(d0), 0, finish=FinishReason.STOP)
    assert changes(world) == [BreakerState.OPEN]


# forward progress


def test_only_new_progress_resets_stall_clock(world: BrainHarness) -> None:
    p0, d0 = world.join_node("p0", PREFILL), world.join_node("d0", DECODE)
    world.advance(500.0)
    assert world.brain.seconds_without_progress(world.now) == 0.0, "nobody is here"
    request = world.submit(timeout=FAR)
    assert world.brain.seconds_without_progress(world.now) == 0.0
    for _ in range(10):  # tried again and again, and no further
        world.advance(3.0)
        if world.brain.count_attempts(d0):
            world.report_reserved(d0, world.last_attempt_key(d0), p0)
            world.report_failure(d0, world.last_attempt_key(d0), OutOfMemory("none left"))
    assert world.brain.get_request_state(request) in (RequestState.PLACED, RequestState.QUEUED)
    assert world.brain.seconds_without_progress(world.now) > 20.0
    if not world.brain.count_attempts(d0):
        world.advance(MAX_BACKOFF_SECONDS)
    world.report_reserved(d0, world.last_attempt_key(d0), p0)
    world.report_prefill_ended(p0, world.last_attempt_key(p0))
    world.report_token(d0, world.last_attempt_key(d0), 0)
    assert world.brain.seconds_without_progress(world.now) == 0.0
    world.cancel(request)
    world.advance(100.0)
    assert world.brain.seconds_without_progress(world.now) == 0.0


def test_waiting_for_room_counts_as_stalled(world: BrainHarness) -> None:
    world.join_node("p0", PREFILL)
    d0 = world.join_node("d0", DECODE)
    world.submit(timeout=FAR)
    world.send_from_node(
        d0, ReservationRefused(world.last_attempt_key(d0), needed_blocks=5, free_blocks=2)
    )
    world.advance(20.0)
    assert (world.brain.running_requests, world.brain.queued_requests) == (0, 1)
    assert world.brain.seconds_without_progress(world.now) == pytest.approx(20.0)
