"""What can be told of a request: while it runs, after each kind of end, and for how long."""

import pytest

from baton.errors import LeaseExpired, NodeGone, NotFound
from baton.pb.cluster_pb2 import ExplainResponse
from baton.pb.common_pb2 import FINISH_REASON_LENGTH
from baton.types import AttemptKey, FinishReason, Incarnation, RequestId
from coordinator.core import messages as m
from coordinator.core.explain import MAX_AGE, Explanations
from coordinator.core.notes import MAX_CONSIDERED
from coordinator.core.record import MAX_TRIED
from tests.unit.coordinator_core.world import DECODE, PREFILL, World

STAGES = ("queue", "reserve", "prefill", "transfer", "first_token")


@pytest.fixture
def world() -> World:
    return World(explain_keep=3)


def told(world: World, request: RequestId) -> ExplainResponse:
    return world.brain.explain(request, world.now)


def stages(told: ExplainResponse) -> list[float]:
    return [getattr(told.timeline, stage) for stage in STAGES]


def serve(world: World, prefill: Incarnation, decode: Incarnation, cached: int = 0) -> AttemptKey:
    """One hand-off, whose steps are a second apart, and one token."""
    key = world.key(decode)
    world.advance(1.0)
    world.reserve(decode, key, prefill)
    world.advance(1.0)
    world.prefill_ended(prefill, key, computed=20 - cached, cached=cached)
    world.advance(1.0)
    world.say(decode, m.Admitted(key, computed_tokens=0, cached_tokens=0, received_tokens=20))
    world.advance(1.0)
    world.token(decode, key, 0)
    return key


def test_a_request_that_was_served(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit(max_tokens=2)
    key = serve(world, p0, d0, cached=16)
    running = told(world, request)
    assert (running.state, running.output_tokens, running.attempts[0].ended) == ("streaming", 1, "")
    world.handed_off(p0, key)
    world.advance(2.5)
    world.token(d0, key, 1, finish=FinishReason.LENGTH)
    end = told(world, request)
    assert (end.state, end.finish_reason, end.HasField("error")) == ("finished", FINISH_REASON_LENGTH, False)
    assert (end.prompt_tokens, end.output_tokens, end.max_tokens) == (20, 2, 2)
    assert stages(end) == pytest.approx([0, 1, 1, 1, 1])
    assert (end.timeline.ttft, end.decode) == pytest.approx((4.0, 2.5))
    sources = end.sources
    assert (sources.computed_prefill, sources.local_cache, sources.computed_decode, sources.received) == (4, 16, 0, 20)
    [attempt] = end.attempts
    assert (attempt.prefill_node, attempt.decode_node, attempt.ended) == ("p0", "d0", "served")
    assert (attempt.placed, attempt.reserved, attempt.prefill_ended, attempt.committed) == pytest.approx((0, 1, 2, 3))
    assert attempt.over == pytest.approx(6.5)
    assert attempt.handoff.bytes == end.timeline.handoff.bytes == 10
    assert [(one.node, one.able, one.chosen) for one in attempt.considered] == [("p0", True, True), ("d0", True, True)]


@pytest.mark.parametrize("prefill_is_faster", [False, True])
def test_a_context_that_decode_holds_is_told_as_decodes_own(
    world: World, p0: Incarnation, d0: Incarnation, prefill_is_faster: bool
) -> None:
    """The prefill node that was chosen has no part in the answer, and there is no hand-off that could take time."""
    request = world.submit(max_tokens=2)
    key = world.key(d0)
    world.advance(1.0)
    if prefill_is_faster:
        world.prefill_ended(p0, key, computed=0, cached=20)
    world.say(d0, m.Reserved(key, None, held_tokens=19))
    world.advance(2.0)
    if not prefill_is_faster:
        world.prefill_ended(p0, key, computed=0, cached=20)
    world.advance(1.0)
    world.say(d0, m.Admitted(key, computed_tokens=1, cached_tokens=19, received_tokens=0))
    world.token(d0, key, 0)
    world.token(d0, key, 1, finish=FinishReason.LENGTH)
    end = told(world, request)
    [attempt] = end.attempts
    assert (attempt.way, attempt.why, attempt.HasField("other_way")) == ("local", "held", False)
    assert (attempt.computed_prefill, attempt.computed_decode, attempt.local_cache, attempt.received) == (0, 1, 19, 0)
    assert stages(end) == pytest.approx([0, 1, 3, 0, 0])
    assert not attempt.HasField("prefill_ended")


def test_a_hand_off_that_is_reported_after_the_end(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit(max_tokens=1 + 1)
    key = serve(world, p0, d0)
    world.token(d0, key, 1, finish=FinishReason.LENGTH)
    assert not told(world, request).attempts[0].HasField("handoff")
    world.handed_off(p0, key)
    assert told(world, request).attempts[0].handoff.bytes == 10


def test_refused_then_failed_then_served(world: World, p0: Incarnation, d0: Incarnation) -> None:
    """Every attempt says when it was, why it ended, and the stages still add up: the lost attempts are waiting."""
    d1 = world.join("d1", DECODE)
    request = world.submit()
    world.advance(1.0)
    world.say(d0, m.Refused(world.key(d0), needed=3, free=1))
    world.advance(1.0)
    world.fail(d1, world.key(d1), LeaseExpired("the ticket was not renewed"))
    serve(world, p0, d1)
    end = told(world, request)
    refused, failed, served = end.attempts
    assert (refused.ended, refused.needed, refused.free, refused.decode_node) == ("refused", 3, 1, "d0")
    assert (failed.ended, failed.reason) == ("lease_expired", "the ticket was not renewed")
    assert (failed.placed, failed.over, served.placed) == pytest.approx((1.0, 2.0, 2.0))
    assert not next(one for one in failed.considered if one.node == "d0").able
    assert stages(end) == pytest.approx([2, 1, 1, 1, 1])
    assert sum(stages(end)) == pytest.approx(end.timeline.ttft) == pytest.approx(6.0)


def test_one_that_was_cancelled_and_one_that_waits(world: World) -> None:
    waiting = world.submit() if world.brain.registry.model else None
    assert waiting is None
    world.join("p0", PREFILL)
    world.join("d0", DECODE)
    request = world.submit()
    assert told(world, request).state == "placed"
    world.cancel(request)
    end = told(world, request)
    assert (end.state, end.error.code, end.attempts[0].ended) == ("failed", "cancelled", "cancelled")
    assert (end.decode, end.output_tokens) == (0.0, 0)


def test_what_is_kept_is_bounded_in_count_and_in_age(world: World, p0: Incarnation, d0: Incarnation) -> None:
    requests = [world.submit() for _ in range(4)]
    for request in requests:
        world.cancel(request)
    with pytest.raises(NotFound, match=r"no request 'r1': the last 3 .*--explain-keep.* 1 h"):
        told(world, requests[0])
    for request in requests[1:]:
        assert told(world, request).request_id == request
    world.advance(MAX_AGE)
    with pytest.raises(NotFound):
        told(world, requests[3])


def test_keeping_none_is_allowed() -> None:
    kept = Explanations(0)
    kept.add(ExplainResponse(request_id="r"), 1.0)
    assert len(kept) == 0


def test_what_one_request_can_hold_is_bounded(world: World, p0: Incarnation) -> None:
    decodes = [world.join(f"d{number}", DECODE) for number in range(MAX_CONSIDERED + 4)]
    request = world.submit()
    for _ in range(MAX_TRIED + 10):
        node = next(node for node in decodes if world.brain.placed_on(node))
        world.say(node, m.Refused(world.key(node), needed=3, free=1))
        world.beat(node)
    end = told(world, request)
    numbers = [attempt.number for attempt in end.attempts]
    assert (len(numbers), numbers[0], numbers[-1]) == (MAX_TRIED, 1, MAX_TRIED + 11)
    assert end.attempts_left_out == 11
    assert max(len(attempt.considered) for attempt in end.attempts) == MAX_CONSIDERED + 1
    assert all(sum(one.chosen for one in attempt.considered) == 2 for attempt in end.attempts)
    assert len(end.SerializeToString()) < 30_000


def test_never_a_word_of_the_prompt() -> None:
    """By construction: no field could hold one."""
    fields = {field.name: field for field in ExplainResponse.DESCRIPTOR.fields}
    assert not {"prompt", "text", "token_ids", "output"} & fields.keys()


def test_a_node_that_died_is_named_though_it_is_gone(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit()
    world.gone(d0)
    [attempt] = told(world, request).attempts
    assert (attempt.decode_node, attempt.ended) == ("d0", NodeGone.code)


def test_the_first_of_an_answer_tells_of_the_others(world: World, p0: Incarnation, d0: Incarnation) -> None:
    """Also while some run and some have ended; what is not kept any more is named."""
    arrivals = [world.arrival(choice=choice, prompt=20 + choice) for choice in range(4)]
    first, second, third, fourth = (arrival.request.id for arrival in arrivals)
    world.submit_all(*arrivals)
    world.cancel(second)
    answer = told(world, first)
    assert [other.request_id for other in answer.others] == [second, third, fourth]
    assert [other.state for other in answer.others] == ["failed", "placed", "placed"]
    assert [other.prompt_tokens for other in answer.others] == [21, 22, 23]
    assert answer.attempts[0].considered
    assert not answer.others[1].attempts[0].considered
    assert list(told(world, third).others) == []
    assert told(world, third).attempts[0].considered
    for request in (third, fourth, first):
        world.cancel(request)
    assert [other.state for other in told(world, first).others] == ["", "failed", "failed"]
