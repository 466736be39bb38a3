"""What is explained of a request: while it runs, after each kind of end, and for how long."""

import pytest

from baton.cluster_link.messages import (
    BlocksReserved,
    DecodeStarted,
    ReservationRefused,
    StepTokens,
)
from baton.cluster_link.report_types import VerifiedDraft
from baton.errors import LeaseExpired, NodeLost, NotFound
from baton.pb.cluster_pb2 import ExplainResponse
from baton.pb.common_pb2 import FINISH_REASON_LENGTH
from baton.types import AttemptKey, FinishReason, Incarnation, RequestId, TokenEvent
from coordinator.core.placement.request_placer import MAX_CONSIDERED
from coordinator.core.requests.explain import MAX_AGE_SECONDS, ExplanationStore
from coordinator.core.requests.explanation import RequestExplanation
from coordinator.core.requests.record import MAX_ATTEMPT_HISTORY
from tests.unit.coordinator.core.brain_harness import DECODE, PREFILL, BrainHarness

STAGES = ("queue", "reserve", "prefill", "transfer", "first_token")


@pytest.fixture
def world() -> BrainHarness:
    return BrainHarness(explain_keep=3)


def explain_request(world: BrainHarness, request: RequestId) -> ExplainResponse:
    return world.explain_request(request)


def stages(told: ExplainResponse) -> list[float]:
    return [getattr(told.timeline, stage) for stage in STAGES]


def serve(
    world: BrainHarness, prefill: Incarnation, decode: Incarnation, cached: int = 0
) -> AttemptKey:
    """Serve a request with one hand-off, whose stages last a second each, and one token."""
    key = world.last_attempt_key(decode)
    world.advance(1.0)
    world.report_reserved(decode, key, prefill)
    world.advance(1.0)
    world.report_prefill_ended(prefill, key, computed=20 - cached, cached=cached)
    world.advance(1.0)
    world.send_from_node(
        decode, DecodeStarted(key, computed_tokens=0, cached_tokens=0, received_tokens=20)
    )
    world.advance(1.0)
    world.report_token(decode, key, 0)
    return key


def test_explains_served_request(world: BrainHarness, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit(max_tokens=2)
    key = serve(world, p0, d0, cached=16)
    running = explain_request(world, request)
    assert (running.state, running.output_tokens, running.attempts[0].ended) == ("streaming", 1, "")
    world.report_handed_off(p0, key)
    world.advance(2.5)
    world.report_token(d0, key, 1, finish=FinishReason.LENGTH)
    end = explain_request(world, request)
    assert (end.state, end.finish_reason, end.HasField("error")) == (
        "finished",
        FINISH_REASON_LENGTH,
        False,
    )
    assert (end.prompt_tokens, end.output_tokens, end.max_tokens) == (20, 2, 2)
    assert stages(end) == pytest.approx([0, 1, 1, 1, 1])
    assert (end.timeline.ttft, end.decode) == pytest.approx((4.0, 2.5))
    sources = end.sources
    assert (
        sources.computed_prefill,
        sources.local_cache,
        sources.computed_decode,
        sources.received,
    ) == (4, 16, 0, 20)
    [attempt] = end.attempts
    assert (attempt.prefill_node, attempt.decode_node, attempt.ended) == ("p0", "d0", "served")
    assert (
        attempt.placed,
        attempt.reserved,
        attempt.prefill_ended,
        attempt.committed,
    ) == pytest.approx((0, 1, 2, 3))
    assert attempt.over == pytest.approx(6.5)
    assert attempt.handoff.bytes == end.timeline.handoff.bytes == 10
    assert [(one.node, one.able, one.chosen) for one in attempt.considered] == [
        ("p0", True, True),
        ("d0", True, True),
    ]


@pytest.mark.parametrize("prefill_is_faster", [False, True])
def test_context_cached_on_decode_is_reported_as_local(
    world: BrainHarness, p0: Incarnation, d0: Incarnation, prefill_is_faster: bool
) -> None:
    """The chosen prefill node takes no part, and there is no hand-off that could take time."""
    request = world.submit(max_tokens=2)
    key = world.last_attempt_key(d0)
    world.advance(1.0)
    if prefill_is_faster:
        world.report_prefill_ended(p0, key, computed=0, cached=20)
    world.send_from_node(d0, BlocksReserved(key, None, held_tokens=19))
    world.advance(2.0)
    if not prefill_is_faster:
        world.report_prefill_ended(p0, key, computed=0, cached=20)
    world.advance(1.0)
    world.send_from_node(
        d0, DecodeStarted(key, computed_tokens=1, cached_tokens=19, received_tokens=0)
    )
    world.report_token(d0, key, 0)
    world.report_token(d0, key, 1, finish=FinishReason.LENGTH)
    end = explain_request(world, request)
    [attempt] = end.attempts
    assert (attempt.way, attempt.why, attempt.HasField("other_way")) == ("local", "held", False)
    assert (
        attempt.computed_prefill,
        attempt.computed_decode,
        attempt.local_cache,
        attempt.received,
    ) == (0, 1, 19, 0)
    assert stages(end) == pytest.approx([0, 1, 3, 0, 0])
    assert not attempt.HasField("prefill_ended")


def test_handoff_report_after_end_is_added(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit(max_tokens=1 + 1)
    key = serve(world, p0, d0)
    world.report_token(d0, key, 1, finish=FinishReason.LENGTH)
    assert not explain_request(world, request).attempts[0].HasField("handoff")
    world.report_handed_off(p0, key)
    assert explain_request(world, request).attempts[0].handoff.bytes == 10


def test_explains_refused_then_failed_then_served(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    """Every attempt has its time and its reason, and the stages add up: lost attempts count as
    waiting."""
    d1 = world.join_node("d1", DECODE)
    request = world.submit()
    world.advance(1.0)
    world.send_from_node(
        d0, ReservationRefused(world.last_attempt_key(d0), needed_blocks=3, free_blocks=1)
    )
    world.advance(1.0)
    world.report_failure(d1, world.last_attempt_key(d1), LeaseExpired("the ticket was not renewed"))
    serve(world, p0, d1)
    end = explain_request(world, request)
    refused, failed, served = end.attempts
    assert (refused.ended, refused.needed, refused.free, refused.decode_node) == (
        "refused",
        3,
        1,
        "d0",
    )
    assert (failed.ended, failed.reason) == ("lease_expired", "the ticket was not renewed")
    assert (failed.placed, failed.over, served.placed) == pytest.approx((1.0, 2.0, 2.0))
    assert not next(one for one in failed.considered if one.node == "d0").able
    assert stages(end) == pytest.approx([2, 1, 1, 1, 1])
    assert sum(stages(end)) == pytest.approx(end.timeline.ttft) == pytest.approx(6.0)


def test_explains_cancelled_and_waiting_requests(world: BrainHarness) -> None:
    waiting = world.submit() if world.brain.node_registry.model_identity else None
    assert waiting is None
    world.join_node("p0", PREFILL)
    world.join_node("d0", DECODE)
    request = world.submit()
    assert explain_request(world, request).state == "placed"
    world.cancel(request)
    end = explain_request(world, request)
    assert (end.state, end.error.code, end.attempts[0].ended) == (
        "failed",
        "cancelled",
        "cancelled",
    )
    assert (end.decode, end.output_tokens) == (0.0, 0)


def test_stored_explanations_are_bounded_in_count_and_age(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    requests = [world.submit() for _ in range(4)]
    for request in requests:
        world.cancel(request)
    with pytest.raises(NotFound, match=r"no request 'r1': the last 3 .*--explain-keep.* 1 h"):
        explain_request(world, requests[0])
    for request in requests[1:]:
        assert explain_request(world, request).request_id == request
    world.advance(MAX_AGE_SECONDS)
    with pytest.raises(NotFound):
        explain_request(world, requests[3])


def test_nothing_is_kept_with_explain_keep_zero() -> None:
    kept = ExplanationStore(0)
    kept.add_explanation(RequestExplanation(RequestId("r")), 1.0)
    assert len(kept) == 0


def test_size_of_one_explanation_is_bounded(world: BrainHarness, p0: Incarnation) -> None:
    decodes = [world.join_node(f"d{number}", DECODE) for number in range(MAX_CONSIDERED + 4)]
    request = world.submit()
    for _ in range(MAX_ATTEMPT_HISTORY + 10):
        node = next(node for node in decodes if world.brain.count_attempts(node))
        world.send_from_node(
            node, ReservationRefused(world.last_attempt_key(node), needed_blocks=3, free_blocks=1)
        )
        world.send_heartbeat(node)
    end = explain_request(world, request)
    numbers = [attempt.number for attempt in end.attempts]
    assert (len(numbers), numbers[0], numbers[-1]) == (
        MAX_ATTEMPT_HISTORY,
        1,
        MAX_ATTEMPT_HISTORY + 11,
    )
    assert end.attempts_left_out == 11
    assert max(len(attempt.considered) for attempt in end.attempts) == MAX_CONSIDERED + 1
    assert all(sum(one.chosen for one in attempt.considered) == 2 for attempt in end.attempts)
    assert len(end.SerializeToString()) < 30_000


def test_explanation_contains_no_prompt_text() -> None:
    """No field could hold one."""
    fields = {field.name: field for field in ExplainResponse.DESCRIPTOR.fields}
    assert not {"prompt", "text", "token_ids", "output"} & fields.keys()


def test_explanation_names_a_node_that_was_lost(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit()
    world.lose_node(d0)
    [attempt] = explain_request(world, request).attempts
    assert (attempt.decode_node, attempt.ended) == ("d0", NodeLost.code)


def test_first_choice_explains_its_siblings(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    """Even if some run and some have ended; those that are not kept any more are named."""
    requests = [world.make_request(choice=choice, prompt=20 + choice) for choice in range(4)]
    first, second, third, fourth = (request.id for request in requests)
    world.submit_all(*requests)
    world.cancel(second)
    answer = explain_request(world, first)
    assert [other.request_id for other in answer.others] == [second, third, fourth]
    assert [other.state for other in answer.others] == ["failed", "placed", "placed"]
    assert [other.prompt_tokens for other in answer.others] == [21, 22, 23]
    assert answer.attempts[0].considered
    assert not answer.others[1].attempts[0].considered
    assert list(explain_request(world, third).others) == []
    assert explain_request(world, third).attempts[0].considered
    for request in (third, fourth, first):
        world.cancel(request)
    assert [other.state for other in explain_request(world, first).others] == [
        "",
        "failed",
        "failed",
    ]


def test_draft_tokens_are_counted_in_their_attempt(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    """Also those of the step that ends the request, and none of a node that has no part in it."""
    request = world.submit(max_tokens=6)
    key = serve(world, p0, d0)
    steps = (
        StepTokens((TokenEvent(key, 1, 7), TokenEvent(key, 2, 8)), (VerifiedDraft(key, 4, 1),)),
        StepTokens((TokenEvent(key, 3, 7),), (VerifiedDraft(key, 2, 0),)),
    )
    for step in steps:
        world.send_from_node(d0, step)
    world.send_from_node(p0, StepTokens((), (VerifiedDraft(key, 9, 9),)))
    last = tuple(
        TokenEvent(key, index, 7, FinishReason.LENGTH if index == 5 else None) for index in (4, 5)
    )
    world.send_from_node(d0, StepTokens(last, (VerifiedDraft(key, 1, 1),)))
    end = explain_request(world, request)
    assert (end.state, end.output_tokens) == ("finished", 6)
    attempt = end.attempts[0]
    assert (attempt.draft_tokens, attempt.accepted_draft_tokens) == (7, 2)
