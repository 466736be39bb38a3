"""Further choices of one prompt wait for the first one, and then need no prefill."""

from collections.abc import Callable
from typing import Any

import pytest

from baton.cluster_link.messages import DecodeOrder, DecodeStarted, PrefillOrder, ReservationRefused
from baton.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    LeaseExpired,
    Overloaded,
    Preempted,
    ServiceUnavailable,
    ShuttingDown,
)
from baton.types import AttemptKey, FinishReason, Incarnation, RequestId
from coordinator.core.admission.waiting_queue import MAX_BYPASS, WaitingQueue
from coordinator.core.requests.record import RequestState
from tests.unit.coordinator.core.brain_harness import DECODE, PREFILL, BrainHarness


def family(world: BrainHarness, count: int = 3, **fields: Any) -> list[RequestId]:
    first = world.submit(**fields)
    return [
        first,
        *(world.submit(after=first, choice=choice, **fields) for choice in range(1, count)),
    ]


def requests_of(world: BrainHarness, node: Incarnation, kind: type[Any]) -> list[RequestId]:
    return [order.work.key.request_id for order in world.messages_to(node, kind)]


def commit(world: BrainHarness, prefill: Incarnation, decode: Incarnation) -> AttemptKey:
    key = world.last_attempt_key(prefill)
    world.report_reserved(decode, key, prefill)
    world.send_from_node(decode, DecodeStarted(key, 0, 0, 20))
    return key


def first_token(world: BrainHarness, prefill: Incarnation, decode: Incarnation) -> None:
    world.report_token(decode, world.last_attempt_key(decode), 0)


def admitted(world: BrainHarness, prefill: Incarnation, decode: Incarnation) -> None:
    world.send_from_node(decode, DecodeStarted(world.last_attempt_key(decode), 0, 0, 20))


def handed_off(world: BrainHarness, prefill: Incarnation, decode: Incarnation) -> None:
    world.report_handed_off(prefill, world.last_attempt_key(prefill))


@pytest.mark.parametrize("word", [first_token, admitted, handed_off])
def test_parallel_choices_compute_prompt_once(
    world: BrainHarness,
    p0: Incarnation,
    d0: Incarnation,
    word: Callable[[BrainHarness, Incarnation, Incarnation], None],
) -> None:
    one, two, three = family(world)
    world.report_reserved(d0, world.last_attempt_key(d0), p0)
    world.report_prefill_ended(p0, world.last_attempt_key(p0))
    assert requests_of(world, d0, DecodeOrder) == [one]
    assert world.brain.queued_requests == 2
    word(world, p0, d0)
    assert requests_of(world, d0, DecodeOrder) == [one, two, three]
    assert [order.kv_writer for order in world.messages_to(d0, DecodeOrder)][1:] == [None, None]
    assert [order.work.key.choice_index for order in world.messages_to(d0, DecodeOrder)] == [
        0,
        1,
        2,
    ]
    assert requests_of(world, p0, PrefillOrder) == [one]
    for request in (two, three):
        assert world.brain.get_request_state(request) is RequestState.PLACED


def test_parallel_choices_count_each_prompt_token_once(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    family(world)
    world.report_prefill_ended(p0, world.last_attempt_key(p0))
    commit(world, p0, d0)
    for submit in world.messages_to(d0, DecodeOrder)[1:]:
        world.send_from_node(d0, DecodeStarted(submit.work.key, 1, 19, 0))
    counted = world.brain.counters.prompt_tokens
    assert counted == {
        "computed_prefill": 20,
        "computed_decode": 2,
        "local_cache": 38,
        "pool": 0,
        "remote_pool": 0,
    }


def test_follower_after_commit_goes_to_holder_at_once(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    world.join_node("d1", DECODE)
    first = world.submit()
    decode = next(
        node for node in world.brain.node_registry.nodes if world.messages_to(node, DecodeOrder)
    )
    world.report_reserved(decode, world.last_attempt_key(decode), p0)
    world.report_token(decode, world.last_attempt_key(decode), 0)
    second = world.submit(after=first, choice=1)
    assert requests_of(world, decode, DecodeOrder) == [first, second]
    assert world.messages_to(decode, DecodeOrder)[1].kv_writer is None


@pytest.mark.parametrize(
    "fields", [{"prompt": 19}, {"cache_salt": b"other"}, {"prompt_logprobs": 0}]
)
def test_request_without_shareable_prefix_is_placed_at_once(
    world: BrainHarness, p0: Incarnation, d0: Incarnation, fields: dict[str, Any]
) -> None:
    first = world.submit()
    second = world.submit(after=first, **fields)
    assert requests_of(world, p0, PrefillOrder) == [first, second]


def test_request_with_unknown_leader_is_placed_normally(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit(after=RequestId("gone"))
    assert requests_of(world, p0, PrefillOrder) == [request]


def test_leader_end_releases_followers(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    one, two, three = family(world, max_tokens=1)
    world.report_token(p0, world.last_attempt_key(p0), 0, finish=FinishReason.LENGTH)
    assert requests_of(world, p0, PrefillOrder) == [one, two, three]
    assert world.messages_to(d0, DecodeOrder) == []


@pytest.mark.parametrize("error", [Cancelled("the client has gone away"), InvalidRequest("bad")])
def test_leader_failure_releases_followers(
    world: BrainHarness, p0: Incarnation, d0: Incarnation, error: Cancelled | InvalidRequest
) -> None:
    one, two, three = family(world)
    world.cancel(one, error)
    assert requests_of(world, p0, PrefillOrder) == [one, two, three]
    assert world.end_events(two) == []


def test_followers_wait_while_leader_is_requeued(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    one, two = family(world, 2)
    world.report_failure(d0, world.last_attempt_key(d0), LeaseExpired("late"))
    assert requests_of(world, p0, PrefillOrder) == [one, one]
    commit(world, p0, d0)
    assert requests_of(world, d0, DecodeOrder) == [one, one, two]


def refuses(world: BrainHarness, node: Incarnation, key: AttemptKey) -> None:
    world.send_from_node(node, ReservationRefused(key, 2, 32))
    world.send_heartbeat(node)


def preempts(world: BrainHarness, node: Incarnation, key: AttemptKey) -> None:
    world.report_failure(node, key, Preempted("no room"))
    world.send_heartbeat(node)


def fails(world: BrainHarness, node: Incarnation, key: AttemptKey) -> None:
    world.report_failure(node, key, LeaseExpired("late"))


def dies(world: BrainHarness, node: Incarnation, key: AttemptKey) -> None:
    world.lose_node(node)
    world.join_node("d1", DECODE)


@pytest.mark.parametrize("trouble", [refuses, preempts, fails, dies])
def test_follower_that_holder_did_not_serve_is_placed_with_prefill(
    world: BrainHarness,
    p0: Incarnation,
    d0: Incarnation,
    trouble: Callable[[BrainHarness, Incarnation, AttemptKey], None],
) -> None:
    one, two = family(world, 2)
    commit(world, p0, d0)
    world.cancel(one)
    trouble(world, d0, world.last_attempt_key(d0))
    assert requests_of(world, p0, PrefillOrder) == [one, two]
    assert world.messages_to(p0, PrefillOrder)[-1].work.key == (two, 2, 1)


def test_full_holder_sends_follower_to_other_node(world: BrainHarness, p0: Incarnation) -> None:
    d0 = world.join_node("d0", DECODE, max_num_seqs=1)
    one, two = family(world, 2)
    commit(world, p0, d0)
    assert world.brain.queued_requests == 1, "it waits for room there, or anywhere"
    d1 = world.join_node("d1", DECODE)
    assert requests_of(world, d1, DecodeOrder) == [two]
    assert requests_of(world, p0, PrefillOrder) == [one, two]


def test_follower_waits_for_full_holder_if_no_other_decode_node(
    world: BrainHarness, p0: Incarnation
) -> None:
    d0 = world.join_node("d0", DECODE, max_num_seqs=1)
    one, two = family(world, 2)
    key = commit(world, p0, d0)
    world.report_token(d0, key, 0, finish=FinishReason.STOP)
    assert requests_of(world, d0, DecodeOrder) == [one, two]
    assert requests_of(world, p0, PrefillOrder) == [one]


def test_held_followers_do_not_block_other_requests(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    one, *_ = family(world, 3)
    stranger = world.submit(prompt=10)
    assert requests_of(world, p0, PrefillOrder) == [one, stranger]


def test_followers_keep_queue_position(world: BrainHarness, p0: Incarnation) -> None:
    """Two families and a request between them; the members of the first arrive before the
    second."""
    d0 = world.join_node("d0", DECODE, max_num_seqs=1)
    ahead = world.submit(prompt=5)
    one, two = family(world, 2)
    three, four = family(world, 2, prompt=30)
    world.cancel(ahead)
    commit(world, p0, d0)
    assert requests_of(world, d0, DecodeOrder) == [ahead, one]
    world.cancel(one)
    assert requests_of(world, d0, DecodeOrder) == [ahead, one, two]
    world.cancel(two)
    assert requests_of(world, d0, DecodeOrder)[-1] == three
    world.cancel(three)
    assert requests_of(world, d0, DecodeOrder)[-1] == four


def test_colocated_choices_share_node() -> None:
    world = BrainHarness(mode="colocated")
    nodes = [world.join_node(name, DECODE) for name in ("d0", "d1")]
    one, two = family(world, 2)
    (decode,) = [node for node in nodes if world.messages_to(node, DecodeOrder)]
    assert requests_of(world, decode, DecodeOrder) == [one]
    world.send_from_node(decode, DecodeStarted(world.last_attempt_key(decode), 20, 0, 0))
    assert requests_of(world, decode, DecodeOrder) == [one, two]


def test_held_follower_can_be_cancelled(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    _, two, three = family(world)
    world.cancel(two)
    assert isinstance(world.end_error(two), Cancelled)
    commit(world, p0, d0)
    assert requests_of(world, d0, DecodeOrder)[1:] == [three]
    assert world.cancel(two) == []


def test_held_follower_has_deadline(world: BrainHarness, p0: Incarnation, d0: Incarnation) -> None:
    first = world.submit(timeout=20.0)
    second = world.submit(after=first, timeout=10.0)
    world.advance(10.0)
    assert isinstance(world.end_error(second), DeadlineExceeded)
    assert world.end_events(first) == []


def test_held_follower_survives_loss_of_its_nodes(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    one, two = family(world, 2)
    world.lose_node(d0)
    world.lose_node(p0)
    p1, d1 = world.join_node("p1", PREFILL), world.join_node("d1", DECODE)
    assert requests_of(world, p1, PrefillOrder) == [one]
    commit(world, p1, d1)
    assert requests_of(world, d1, DecodeOrder) == [one, two]


def test_held_follower_is_finished_while_draining(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    _, two = family(world, 2)
    world.brain.start_draining()
    with pytest.raises(ShuttingDown):
        world.submit()
    commit(world, p0, d0)
    assert requests_of(world, d0, DecodeOrder)[-1] == two


def test_without_nodes_all_choices_are_rejected_together(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    world.lose_node(d0)
    requests = family(world)
    world.advance(1.0)
    for request in requests:
        assert isinstance(world.end_error(request), ServiceUnavailable)
    assert world.brain.queued_requests == 0


def test_choices_are_admitted_all_or_none(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    first = world.submit()
    for _ in range(6):
        world.submit(after=first)
    requests = [world.make_request() for _ in range(3)]
    with pytest.raises(
        Overloaded, match="6 requests are waiting, 3 more would come, the limit is 8"
    ):
        world.submit_all(*requests)
    assert len(world.brain.list_active_requests()) == 7
    world.submit_all(*requests[:2])
    assert len(world.brain.list_active_requests()) == 9
    with pytest.raises(InvalidRequest, match=r"9 outputs .* the limit is 8"):
        world.submit_all(*(world.make_request() for _ in range(9)))


def test_one_oversized_choice_rejects_all(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    with pytest.raises(ContextLengthExceeded):
        world.submit_all(world.make_request(), world.make_request(max_tokens=10_000))
    assert world.brain.list_active_requests() == []
    assert world.effects == []


def test_held_request_does_not_count_as_bypassed() -> None:
    queue = WaitingQueue()
    held, *others = [RequestId(f"r{number}") for number in range(MAX_BYPASS + 3)]
    for request in (held, *others):
        queue.add_request(request)
    queue.hold_request(held)
    for request in others[:-1]:
        assert queue.list_candidates()[0] == request
        queue.take_request(request, 0.0)
    assert (len(queue), queue.list_candidates()) == (2, others[-1:])
    queue.release_request(held)
    assert queue.list_candidates() == [held, others[-1]]
