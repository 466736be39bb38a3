"""The waiting queue: order, bounded bypass and retry delays."""

import pytest

from baton.types import RequestId
from coordinator.core.admission.waiting_queue import MAX_BYPASS, SCAN_DEPTH, WaitingQueue
from tests.unit.coordinator.core.brain_harness import DECODE, PREFILL, BrainHarness


def names(count: int) -> list[RequestId]:
    return [RequestId(f"r{number}") for number in range(count)]


def filled(count: int) -> WaitingQueue:
    queue = WaitingQueue()
    for name in names(count):
        queue.add_request(name)
    return queue


def test_queue_is_fifo_with_bounded_lookahead() -> None:
    assert filled(SCAN_DEPTH + 5).list_candidates() == names(SCAN_DEPTH)


def test_queue_head_is_bypassed_at_most_max_bypass_times() -> None:
    queue = filled(MAX_BYPASS + 5)
    head, *others = names(MAX_BYPASS + 5)
    for other in others[:MAX_BYPASS]:
        assert other in queue.list_candidates()
        queue.take_request(other, 0.0)
    assert queue.list_candidates() == [head]
    queue.take_request(head, 0.0)
    assert queue.list_candidates() == others[MAX_BYPASS:]


def test_requeued_request_goes_to_head() -> None:
    queue = filled(2)
    queue.add_request_front(RequestId("again"))
    assert queue.list_candidates() == [RequestId("again"), *names(2)]
    queue.remove_request(RequestId("again"))
    queue.remove_request(RequestId("again"))
    assert len(queue) == 2


def test_retry_after_follows_service_rate() -> None:
    queue = filled(100)
    assert queue.backlog.retry_after_seconds() == 1.0
    for second, name in enumerate(names(10)):
        queue.take_request(name, float(second))
    assert queue.backlog.retry_after_seconds() == pytest.approx(
        60.0
    )  # 90 waiting, about one a second, and the limit
    for name in names(100)[10:80]:
        queue.take_request(name, 10.0)
    assert 1.0 <= queue.backlog.retry_after_seconds() < 5.0


def test_big_request_is_neither_starved_nor_blocking() -> None:
    world = BrainHarness(max_queue=200)
    world.join_node("p0", PREFILL)
    d0 = world.join_node("d0", DECODE, num_blocks=16, max_num_seqs=8)
    world.send_heartbeat(d0, room=8)
    big = world.submit(prompt=200)  # needs 13 or more
    world.advance(1.0)  # and is due by now: until then, short ones pass it as they come
    assert world.brain.queued_requests == 1
    passed = 0
    while passed < MAX_BYPASS + 10:
        small = world.submit(prompt=4, max_tokens=2)
        if world.brain.queued_requests > 1:
            break
        passed += 1
        world.cancel(small)
    assert passed == MAX_BYPASS
    world.send_heartbeat(d0, room=16)
    assert world.brain.get_request_state(big) is not None
    assert world.brain.queued_requests == 0
