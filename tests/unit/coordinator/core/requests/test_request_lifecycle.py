"""The rules of the request table, one by one."""

import pytest

from baton.cluster_link.messages import (
    AttemptFailed,
    BlocksReserved,
    CancelOrder,
    DecodeOrder,
    DecodeStarted,
    PrefillOrder,
    ReservationRefused,
    StepTokens,
    TicketOrder,
)
from baton.errors import (
    Cancelled,
    IncompleteTransfer,
    InvalidRequest,
    LeaseExpired,
    OutOfBlocks,
    ServiceUnavailable,
)
from baton.types import FinishReason, Incarnation, TokenEvent
from coordinator.core.common.effects import AdmitRequest, FinishedResult
from coordinator.core.common.settings import MAX_BACKOFF_SECONDS
from coordinator.core.requests.record import RequestState
from simulator.node_messages import make_ticket
from tests.unit.coordinator.core.brain_harness import (
    DECODE,
    PREFILL,
    BrainHarness,
    stream_first_token,
)


def test_both_legs_are_sent_at_once_and_ticket_goes_to_prefill_node(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit()
    (submit,) = world.messages_to(d0, DecodeOrder)
    (prefill,) = world.messages_to(p0, PrefillOrder)
    assert submit.work == prefill.work
    assert submit.kv_writer is not None
    assert submit.kv_writer.incarnation == p0
    assert not prefill.needs_no_decode
    assert submit.work.request.timeout_seconds == 60.0
    key = submit.work.key
    assert key == (request, 1, 0)
    world.report_reserved(d0, key, p0)
    assert world.messages_to(p0, TicketOrder) == [TicketOrder(make_ticket(d0, key, p0))]


def test_request_is_served_from_submission_to_its_last_token(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit(max_tokens=3)
    key = stream_first_token(world, p0, d0)
    world.report_handed_off(p0, key)
    assert world.brain.count_attempts(p0) == 0
    world.send_from_node(
        d0, StepTokens((TokenEvent(key, 1, 8), TokenEvent(key, 2, 9, FinishReason.LENGTH)))
    )
    assert world.emitted_tokens(request) == [7, 8, 9]
    end = world.end_event(request)
    assert end.result == FinishedResult(FinishReason.LENGTH, 0)
    assert end.timeline.handoff is not None
    assert end.timeline.handoff.bytes == 10
    assert world.count_placed() == 0
    assert world.messages_to(p0, CancelOrder) == []
    assert world.brain.counters.requests == {("length", "default"): 1}
    assert world.brain.parts.ended_requests.timelines.get(request) == end.timeline


def test_decode_with_full_prefix_hit_cancels_prefill_leg(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    world.submit()
    world.report_reserved(d0, world.last_attempt_key(d0), None)
    assert [cancel.key for cancel in world.messages_to(p0, CancelOrder)] == [
        world.last_attempt_key(d0)
    ]
    assert (world.brain.count_attempts(p0), world.brain.count_attempts(d0)) == (0, 1)


def test_first_token_that_is_the_last_may_come_from_prefill_node(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit()
    world.report_token(p0, world.last_attempt_key(p0), 0, finish=FinishReason.STOP)
    assert world.emitted_tokens(request) == [7]
    assert world.end_event(request).result == FinishedResult(FinishReason.STOP, 0)
    assert len(world.messages_to(d0, CancelOrder)) == 1


def test_single_token_output_needs_no_decode_node(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit(max_tokens=1)
    (prefill,) = world.messages_to(p0, PrefillOrder)
    assert prefill.needs_no_decode
    assert world.messages_to(d0, DecodeOrder) == []
    world.report_token(p0, prefill.work.key, 0, finish=FinishReason.LENGTH)
    assert world.emitted_tokens(request) == [7]
    assert world.count_placed() == 0


def test_single_token_request_is_admitted_before_decode_node_joins(
    world: BrainHarness, p0: Incarnation
) -> None:
    """Otherwise its client would never learn that the request is accepted."""
    request = world.submit(max_tokens=1)
    assert [effect.request_id for effect in world.effects if isinstance(effect, AdmitRequest)] == [
        request
    ]
    world.report_token(p0, world.last_attempt_key(p0), 0, finish=FinishReason.LENGTH)
    assert isinstance(world.end_event(request).result, FinishedResult)
    other = world.submit(max_tokens=2)
    world.advance(1.0)
    assert isinstance(world.end_error(other), ServiceUnavailable)


def test_last_token_of_requeued_request_needs_no_decode_node(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit(max_tokens=2)
    key = stream_first_token(world, p0, d0)
    world.report_failure(d0, key, LeaseExpired("late"))
    prefill = world.messages_to(p0, PrefillOrder)[-1]
    assert prefill.needs_no_decode
    assert prefill.work.emitted_token_ids == (7,)
    world.report_token(p0, prefill.work.key, 1, token=9, finish=FinishReason.LENGTH)
    assert world.emitted_tokens(request) == [7, 9]
    assert isinstance(world.end_event(request).result, FinishedResult)


def test_complete_output_ends_request_without_finish_reason_from_node(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit(max_tokens=2)
    key = stream_first_token(world, p0, d0)
    world.report_token(d0, key, 1)
    assert world.end_event(request).result == FinishedResult(FinishReason.LENGTH, 0)


@pytest.mark.parametrize("index", [0, 2, 3])
def test_repeated_or_missing_token_fails_only_the_attempt(
    world: BrainHarness, p0: Incarnation, d0: Incarnation, index: int
) -> None:
    request = world.submit()
    key = stream_first_token(world, p0, d0)
    world.report_token(d0, key, index)
    assert world.emitted_tokens(request) == [7]
    again = world.last_attempt_key(d0)
    assert again == (request, 2, 0)
    assert world.messages_to(d0, DecodeOrder)[-1].work.emitted_token_ids == (7,)
    assert world.brain.counters.replaced_attempts == {"stale": 1}


def test_tokens_after_the_last_one_change_nothing(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit(max_tokens=8)
    key = stream_first_token(world, p0, d0)
    late = (TokenEvent(key, 1, 8, FinishReason.STOP), TokenEvent(key, 2, 9))
    world.send_from_node(d0, StepTokens(late))
    assert world.emitted_tokens(request) == [7, 8]
    assert isinstance(world.end_event(request).result, FinishedResult)


def test_prefill_node_may_not_stream_tokens(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit()
    world.report_token(p0, world.last_attempt_key(p0), 0)
    assert world.emitted_tokens(request) == []
    assert world.brain.counters.replaced_attempts == {"stale": 1}


def test_messages_of_another_attempt_or_node_are_dropped(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    d1 = world.join_node("d1", DECODE)
    request = world.submit()
    first = world.last_attempt_key(p0)
    used, spare = (d0, d1) if world.messages_to(d0, DecodeOrder) else (d1, d0)
    world.report_reserved(used, first, p0)
    assert world.report_token(spare, first, 0) == []
    world.report_failure(used, first, LeaseExpired("late"))
    assert world.last_attempt_key(p0).attempt_number == 2
    for message in (
        StepTokens((TokenEvent(first, 0, 5),)),
        BlocksReserved(first, None, 0),
        ReservationRefused(first, 1, 0),
        AttemptFailed(first, InvalidRequest("late")),
        DecodeStarted(first, 0, 0, 0),
    ):
        assert world.send_from_node(used, message) == []
    assert world.emitted_tokens(request) == []
    assert world.brain.get_request_state(request) is RequestState.PLACED


def test_messages_of_older_attempt_on_same_node_are_dropped(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit()
    old = world.last_attempt_key(d0)
    world.report_failure(p0, old, LeaseExpired("late"))
    assert world.last_attempt_key(d0) == (request, 2, 0)
    assert world.report_token(d0, old, 0) == []
    assert world.report_reserved(d0, old, p0) == []
    assert world.emitted_tokens(request) == []


def test_messages_of_stale_incarnation_are_dropped(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    world.submit()
    key = world.last_attempt_key(d0)
    world.join_node("d0", DECODE)
    assert world.report_reserved(d0, key, p0) == []
    assert world.brain.counters.dropped_messages["stale"] == 1


def test_ticket_for_other_attempt_or_node_is_not_forwarded(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    world.submit()
    key = world.last_attempt_key(d0)
    world.send_from_node(d0, BlocksReserved(key, make_ticket(d0, key, Incarnation("p9#1")), 0))
    assert world.messages_to(p0, TicketOrder) == []
    assert world.brain.counters.replaced_attempts == {"stale": 1}


@pytest.mark.parametrize("moment", ["placed", "reserved", "streaming"])
def test_node_death_requeues_request_with_emitted_tokens(moment: str) -> None:
    for victim in ("p", "d") if moment != "streaming" else ("d",):
        world = BrainHarness()
        p0, d0 = world.join_node("p0", PREFILL), world.join_node("d0", DECODE)
        request = world.submit()
        key = world.last_attempt_key(d0)
        if moment != "placed":
            world.report_reserved(d0, key, p0)
        if moment == "streaming":
            world.report_token(d0, key, 0)
        new = world.join_node("p1", PREFILL) if victim == "p" else world.join_node("d1", DECODE)
        world.lose_node(p0 if victim == "p" else d0)
        kind: type[PrefillOrder | DecodeOrder] = PrefillOrder if victim == "p" else DecodeOrder
        work = world.messages_to(new, kind)[0].work
        assert list(work.emitted_token_ids) == world.emitted_tokens(request)
        assert work.key.attempt_number == 2
        assert len(work.request.prompt_token_ids) == 20


def test_handoff_report_is_accepted_only_from_its_writer(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    world.submit()
    key = world.last_attempt_key(d0)
    world.report_handed_off(d0, key)
    assert (world.brain.count_attempts(p0), world.brain.count_attempts(d0)) == (1, 1)
    assert world.brain.counters.handoffs == {}


@pytest.mark.parametrize("proof", ["admitted", "token", "handed off"])
def test_prefill_node_may_leave_after_commit(
    world: BrainHarness, p0: Incarnation, d0: Incarnation, proof: str
) -> None:
    request = world.submit()
    key = world.last_attempt_key(d0)
    world.report_reserved(d0, key, p0)
    if proof == "admitted":
        world.send_from_node(d0, DecodeStarted(key, 0, 0, 20))
    elif proof == "token":
        world.report_token(d0, key, 0)
    else:
        world.report_handed_off(p0, key)
    assert world.brain.count_attempts(p0) == 0
    assert world.messages_to(p0, CancelOrder) == []
    world.report_failure(p0, key, LeaseExpired("the acknowledgement was lost"))
    world.lose_node(p0)
    world.report_token(d0, key, len(world.emitted_tokens(request)))
    assert world.brain.counters.replaced_attempts == {}
    assert world.emitted_tokens(request) in ([7], [7, 7])


def test_handoff_report_counts_after_request_end(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit()
    key = world.last_attempt_key(d0)
    world.report_reserved(d0, key, p0)
    world.report_token(d0, key, 0, finish=FinishReason.STOP)
    assert world.messages_to(p0, CancelOrder) == []
    for _ in range(2):
        world.report_handed_off(p0, key)
    assert world.brain.counters.handoffs == {("committed", "shm"): 1}
    timeline = world.brain.parts.ended_requests.timelines.get(request)
    assert timeline is not None
    assert timeline.handoff is not None
    assert timeline.handoff.bytes == 10


def test_non_replaceable_error_ends_request(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit()
    world.report_failure(p0, world.last_attempt_key(p0), InvalidRequest("token 5 is bad"))
    assert isinstance(world.end_error(request), InvalidRequest)
    assert len(world.messages_to(d0, CancelOrder)) == 1


def test_attempts_are_bounded_and_last_error_is_returned(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit()
    for error in (LeaseExpired("one"), OutOfBlocks("two"), IncompleteTransfer("three")):
        assert world.end_events(request) == []
        world.report_failure(d0, world.last_attempt_key(d0), error)
        world.advance(MAX_BACKOFF_SECONDS)
    assert world.end_error(request).message == "three"
    assert world.end_event(request).timeline.attempts == 3
    assert world.count_placed() == 0


def test_repeated_failures_back_off() -> None:
    """Otherwise a fault of a second would use up every attempt."""
    world = BrainHarness(max_attempts=8)
    world.join_node("p0", PREFILL)
    d0 = world.join_node("d0", DECODE)
    request = world.submit()
    rests = []
    for number in range(7):
        world.report_failure(d0, world.last_attempt_key(d0), LeaseExpired(f"{number}"))
        began = world.now
        while not world.count_placed():
            assert world.brain.queued_requests == 1
            world.advance(0.05)
        rests.append(world.now - began)
    assert rests[0] == 0
    assert rests == sorted(rests)
    assert sum(rests) > 4
    assert world.brain.get_request_state(request) is RequestState.PLACED


def test_request_may_end_during_backoff(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit()
    for _ in range(2):
        world.report_failure(d0, world.last_attempt_key(d0), LeaseExpired("again"))
    assert (world.count_placed(), world.brain.queued_requests) == (0, 1)
    world.cancel(request)
    assert isinstance(world.end_error(request), Cancelled)
    assert world.brain.queued_requests == 0
    world.advance(MAX_BACKOFF_SECONDS)
    assert world.count_placed() == 0


def test_no_node_can_cancel_a_request(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit()
    world.report_failure(
        d0, world.last_attempt_key(d0), Cancelled("the first token ends the request")
    )
    assert world.end_events(request) == []
    assert world.last_attempt_key(d0).attempt_number == 2


def test_the_nodes_of_a_failed_attempt_are_avoided(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    p1, d1 = world.join_node("p1", PREFILL), world.join_node("d1", DECODE)
    world.submit()
    used = [node for node in (p0, p1, d0, d1) if world.brain.count_attempts(node)]
    decode = next(node for node in used if node in (d0, d1))
    world.report_failure(decode, world.last_attempt_key(decode), LeaseExpired("black hole"))
    assert {node for node in (p0, p1, d0, d1) if world.brain.count_attempts(node)} == {
        p0,
        p1,
        d0,
        d1,
    } - set(used)


def test_requeued_requests_go_first_oldest_before_others(
    world: BrainHarness, p0: Incarnation
) -> None:
    d0 = world.join_node("d0", DECODE, max_num_seqs=3)
    placed = [world.submit() for _ in range(3)]
    waiting = world.submit()
    assert world.brain.get_request_state(waiting) is RequestState.QUEUED
    world.lose_node(d0)
    d1 = world.join_node("d1", DECODE)
    assert [order.work.key.request_id for order in world.messages_to(d1, DecodeOrder)] == [
        *placed,
        waiting,
    ]
