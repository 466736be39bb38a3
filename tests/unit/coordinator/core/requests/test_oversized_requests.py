"""Requests that no present node can hold: bounds, parking and their end."""

from typing import Any

import pytest

from baton.cluster_link.messages import (
    DecodeOrder,
    PrefillOrder,
    ReservationRefused,
)
from baton.errors import ServiceUnavailable
from baton.types import FinishReason, Incarnation, RequestId
from coordinator.core.common.effects import FinishedResult
from coordinator.core.requests.record import RequestState
from tests.unit.coordinator.core.brain_harness import (
    DECODE,
    PREFILL,
    BrainHarness,
)


def test_length_bounds_follow_a_cache_that_has_become_smaller(world: BrainHarness) -> None:
    """A node found no memory for 15 of the blocks that it had announced."""
    world.join_node("p0", PREFILL)
    node = world.join_node("d0", DECODE, num_blocks=20)
    assert world.brain.get_model_bounds().current_max_context == 256
    world.send_heartbeat(node, room=20, blocks_total=20)
    assert world.brain.get_model_bounds().current_max_context == 256
    world.send_heartbeat(node, room=5, blocks_total=5)
    assert world.brain.get_model_bounds().current_max_context == 80
    assert world.brain.node_registry.nodes[node].info.num_blocks == 5


def test_length_bounds_follow_largest_decode_node_and_outlive_it(world: BrainHarness) -> None:
    """Prefill nodes set no bound: decode nodes compute what they cannot hold."""
    with pytest.raises(ServiceUnavailable):
        world.brain.get_model_bounds()
    nodes = [
        world.join_node("p0", PREFILL, max_model_len=100),
        world.join_node("d0", DECODE, num_blocks=20),
    ]
    assert (
        world.brain.get_model_bounds().max_context,
        world.brain.get_model_bounds().current_max_context,
    ) == (256, 256)
    world.join_node("d1", DECODE, num_blocks=5)
    world.join_node("p1", PREFILL, max_model_len=40)
    assert world.brain.get_model_bounds().max_context == 256
    world.lose_node(nodes[1])
    assert (
        world.brain.get_model_bounds().max_context,
        world.brain.get_model_bounds().current_max_context,
    ) == (256, 80)
    assert (
        world.brain.get_model_bounds().max_output_tokens(30) == 50
    )  # what a request that names no length asks for
    world.advance(601.0)
    assert world.brain.get_model_bounds().max_context == 80
    for node in list(world.brain.node_registry.nodes):
        world.lose_node(node)
    world.advance(601.0)
    assert world.brain.get_model_bounds().max_context == 80  # the last ones' while nobody is here


@pytest.mark.parametrize("mode", ["disaggregated", "colocated", "auto"])
def test_requests_are_placed_on_nodes_that_can_hold_them(mode: str) -> None:
    world = BrainHarness(mode=mode)
    small = [
        world.join_node("p0", PREFILL, max_model_len=64),
        world.join_node("d0", DECODE, num_blocks=4),
    ]
    large = [world.join_node("p1", PREFILL), world.join_node("d1", DECODE)]
    for _ in range(4):
        request = world.submit(prompt=60, max_tokens=20)
        assert world.brain.get_request_state(request) is RequestState.PLACED
        world.cancel(request)
    decode = large[1]
    assert not world.messages_to(small[1], DecodeOrder)
    assert len(world.messages_to(decode, DecodeOrder)) == 4
    world.submit(prompt=100, max_tokens=5)
    assert not any(
        len(order.work.request.prompt_token_ids) == 100
        for order in world.messages_to(small[0], PrefillOrder)
    )


def test_request_no_node_can_hold_is_parked_and_ends_with_503() -> None:
    world = BrainHarness(mode="colocated", max_queue=200)
    d0, small = world.join_node("d0", DECODE), world.join_node("d1", DECODE, num_blocks=4)
    long = world.submit(prompt=100, max_tokens=20, timeout=20.0)
    world.report_token(d0, world.last_attempt_key(d0), 0)
    world.lose_node(d0)
    assert world.brain.get_request_state(long) is RequestState.QUEUED
    for _ in range(80):  # more than may pass one that waits for room
        short = world.submit(prompt=8, max_tokens=1)
        world.report_token(small, world.last_attempt_key(small), 0, finish=FinishReason.LENGTH)
        assert isinstance(world.end_event(short).result, FinishedResult)
    world.advance(20.0)
    error = world.end_error(long)
    assert isinstance(error, ServiceUnavailable)
    assert "can hold its 120 tokens, the largest holds 64" in error.message


def full_of_long_requests(**settings: Any) -> tuple[BrainHarness, Incarnation, list[RequestId]]:
    """Return a cluster whose queue is full of requests that wait for a larger node."""
    world = BrainHarness(mode="colocated", max_queue=8, **settings)
    large, small = (
        world.join_node("d0", DECODE, max_num_seqs=8),
        world.join_node("d1", DECODE, num_blocks=4),
    )
    long = [world.submit(prompt=100, max_tokens=20, timeout=600.0) for _ in range(8)]
    world.lose_node(large)
    assert {world.brain.get_request_state(request) for request in long} == {RequestState.QUEUED}
    return world, small, long


def test_parked_oversized_requests_take_no_queue_place() -> None:
    world, small, long = full_of_long_requests(max_queue_tokens=800)
    assert (
        world.brain.queued_requests,
        world.brain.running_requests,
        world.brain.queued_tokens,
    ) == (8, 0, 0)
    short = world.submit(prompt=8, max_tokens=1)
    assert world.last_attempt_key(small) == (short, 1, 0)
    world.report_token(small, world.last_attempt_key(small), 0, finish=FinishReason.LENGTH)
    back = world.join_node("d0", DECODE, max_num_seqs=8, process="restarted")
    assert world.last_attempt_key(back).request_id in long
    assert world.brain.queued_tokens > 0
    for request in long:
        world.cancel(request)
    assert (world.brain.queued_requests, world.brain.queued_tokens) == (0, 0)


def test_parked_oversized_requests_are_bounded() -> None:
    world, _, long = full_of_long_requests(max_queue_tokens=800)
    one_more = world.end_error(world.submit(prompt=100, max_tokens=20))
    assert isinstance(one_more, ServiceUnavailable)
    assert one_more.retry_after
    assert "8 requests (--max-queue) already wait for a larger one" in one_more.message
    world.cancel(long.pop())
    longer = world.end_error(world.submit(prompt=150, max_tokens=20))
    assert "700 prompt tokens (--max-queue-tokens) already wait" in longer.message
    assert not any(world.end_events(request) for request in long)


def test_parked_request_resumes_when_larger_node_joins() -> None:
    world = BrainHarness(mode="colocated")
    d0 = world.join_node("d0", DECODE)
    world.join_node("d1", DECODE, num_blocks=4)
    long = world.submit(prompt=100, max_tokens=20)
    world.report_token(d0, world.last_attempt_key(d0), 0)
    world.lose_node(d0)
    back = world.join_node("d0", DECODE, process="restarted")
    assert world.last_attempt_key(back) == (long, 2, 0)
    assert world.messages_to(back, DecodeOrder)[-1].work.emitted_token_ids == (7,)


def test_new_request_for_restarting_node_gets_503_not_400() -> None:
    world = BrainHarness(mode="colocated")
    world.lose_node(world.join_node("d0", DECODE))
    world.join_node("d1", DECODE, num_blocks=4)
    request = world.submit(prompt=100, max_tokens=20)
    world.advance(1.1)
    error = world.end_error(request)
    assert isinstance(error, ServiceUnavailable)
    assert "the largest holds 64" in error.message


def test_refusal_for_length_is_not_retried_on_same_node(world: BrainHarness) -> None:
    """If the node itself refuses the length, the request waits for another node."""
    world.join_node("p0", PREFILL)
    d0 = world.join_node("d0", DECODE)
    request = world.submit()
    world.send_from_node(
        d0, ReservationRefused(world.last_attempt_key(d0), needed_blocks=33, free_blocks=32)
    )
    for _ in range(3):
        world.send_heartbeat(d0)
    assert len(world.messages_to(d0, DecodeOrder)) == 1
    d1 = world.join_node("d1", DECODE)
    assert world.last_attempt_key(d1) == (request, 2, 0)
