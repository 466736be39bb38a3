"""Queue, timers, timeline, sources."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster_link.messages import DecodeStarted, PrefillEnded
from baton.pb.common_pb2 import Timeline
from baton.types import AttemptKey, NodeName, RequestId
from coordinator.core.admission.waiting_queue import MAX_BYPASS, SCAN_DEPTH, WaitingQueue
from coordinator.core.common.timers import RequestTimers
from coordinator.core.requests.attempt_trace import TimelineStore, Timestamps
from coordinator.core.requests.record import (
    TokenSources,
    compute_token_sources,
    count_computed_tokens,
)
from tests.unit.coordinator.core.brain_harness import DECODE, PREFILL, BrainHarness


def names(count: int) -> list[RequestId]:
    return [RequestId(f"r{number}") for number in range(count)]


def filled(count: int) -> WaitingQueue:
    queue = WaitingQueue()
    for name in names(count):
        queue.add_request(name)
    return queue


# the queue


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
    assert queue.backlog.retry_after_seconds(0.0) == 1.0
    for second, name in enumerate(names(10)):
        queue.take_request(name, float(second))
    assert queue.backlog.retry_after_seconds(9.0) == pytest.approx(
        60.0
    )  # 90 waiting, about one a second, and the limit
    for name in names(100)[10:80]:
        queue.take_request(name, 10.0)
    assert 1.0 <= queue.backlog.retry_after_seconds(11.0) < 5.0


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


# timers


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.one_of(st.none(), st.integers(0, 9)))),
    st.integers(0, 9),
)
def test_timers_fire_once_and_in_order(orders: list[tuple[str, int | None]], now: int) -> None:
    timers, model = RequestTimers(), dict[RequestId, float]()
    for name, when in orders:
        request = RequestId(name)
        if when is None:
            timers.cancel_timer(request)
            model.pop(request, None)
        else:
            timers.set_timer(request, float(when))
            model[request] = float(when)
    assert timers.next_timer_at() == min(model.values(), default=None)
    rang = timers.pop_due(float(now))
    assert sorted(rang) == sorted(name for name, when in model.items() if when <= now)
    assert [model[name] for name in rang] == sorted(model[name] for name in rang)
    assert timers.pop_due(float(now)) == []


def test_resetting_timers_does_not_leak() -> None:
    timers = RequestTimers()
    for when in range(10_000):
        timers.set_timer(RequestId("a"), float(when))
    assert len(timers._heap) < 2_000
    assert timers.pop_due(10_000.0) == [RequestId("a")]


# the timeline

MOMENTS = ("reserved", "prefill_ended", "committed", "first_token")


@given(
    st.lists(st.tuples(st.sampled_from([*MOMENTS, "placed"]), st.floats(0.0, 5.0))),
    st.floats(0.0, 1e9),
)
def test_stages_partition_the_time_to_the_first_token(
    script: list[tuple[str, float]], start: float
) -> None:
    marks, now = Timestamps(start), start
    for moment, passed in script:
        now += passed
        if moment == "placed":
            marks.mark_placed(now, NodeName("p"), NodeName("d"))
        else:
            marks.mark_moment(moment, now)
    line = marks.build_timeline(now + 1.0, attempts=1)
    stages = stages_of(line)
    assert all(stage >= 0.0 for stage in stages)
    assert sum(stages) == pytest.approx(line.ttft, rel=1e-12)
    end = now + 1.0 if marks.first_token is None else marks.first_token
    assert line.ttft == pytest.approx(end - start, rel=1e-12, abs=1e-6)
    assert line.total >= line.ttft - 1e-6


def stages_of(line: Timeline) -> tuple[float, ...]:
    return (line.queue, line.reserve, line.prefill, line.transfer, line.first_token)


def marked(**moments: float) -> Timestamps:
    marks = Timestamps(0.0)
    for moment, when in sorted(moments.items(), key=lambda item: item[1]):
        if moment == "placed":
            marks.mark_placed(when, NodeName("p"), NodeName("d"))
        else:
            marks.mark_moment(moment, when)
    return marks


@pytest.mark.parametrize(
    ("marks", "stages"),
    [
        (
            marked(placed=1, reserved=3, prefill_ended=6, committed=10, first_token=15),
            (1, 2, 3, 4, 5),
        ),
        (
            marked(placed=1, prefill_ended=2, reserved=6, committed=10, first_token=15),
            (1, 5, 0, 4, 5),
        ),
        (marked(placed=1, prefill_ended=6, first_token=7), (1, 0, 5, 0, 1)),  # prefill alone
        (marked(placed=1, first_token=7), (1, 0, 6, 0, 0)),  # colocated
        (marked(placed=1, reserved=2, first_token=7), (1, 1, 5, 0, 0)),  # decode needed no writer
        (marked(), (9, 0, 0, 0, 0)),  # never placed
    ],
)
def test_timeline_stages(marks: Timestamps, stages: tuple[float, ...]) -> None:
    assert stages_of(marks.build_timeline(9.0 if marks.first_token is None else 20.0, 1)) == stages


def test_failed_attempt_before_first_token_counts_as_queue_time() -> None:
    marks = marked(placed=1, reserved=2, prefill_ended=3)
    marks.mark_placed(5.0, NodeName("p1"), NodeName("d1"))
    marks.mark_moment("reserved", 6.0)
    marks.mark_moment("first_token", 7.0)
    marks.mark_placed(8.0, NodeName("p2"), NodeName("d2"))
    line = marks.build_timeline(9.0, 3)
    assert stages_of(line) == (5, 1, 1, 0, 0)
    assert line.decode_node == "d2"


def test_timeline_store_is_bounded() -> None:
    ring = TimelineStore(kept=2)
    for name in names(3):
        ring.add_timeline(name, Timeline(attempts=1))
    assert ring.get(names(3)[0]) is None
    assert ring.get(names(3)[2]) is not None


# sources

KEY = AttemptKey(RequestId("r"), 1, 0)


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        ((20, 0), (0, 0, 20), TokenSources(20, 0, 0, 0)),
        ((4, 16), (0, 0, 20), TokenSources(4, 0, 16, 0)),
        ((4, 16), (0, 16, 4), TokenSources(4, 0, 16, 0)),  # both held it: once
        (
            (20, 0),
            (0, 16, 4),
            TokenSources(4, 0, 16, 0),
        ),  # prefill computed it again to reach the rest
        (None, (20, 0, 0), TokenSources(0, 20, 0, 0)),
        (None, (1, 19, 0), TokenSources(0, 1, 19, 0)),
        ((20, 0), None, TokenSources(20, 0, 0, 0)),
        (None, None, TokenSources(0, 0, 0, 0)),
    ],
)
def test_each_prompt_token_has_one_source(
    prefill: tuple[int, int] | None, decode: tuple[int, int, int] | None, expected: TokenSources
) -> None:
    ended = PrefillEnded(KEY, *prefill) if prefill else None
    admitted = DecodeStarted(KEY, *decode) if decode else None
    assert compute_token_sources(ended, admitted) == expected
    assert (
        count_computed_tokens(ended, admitted) == (prefill or (0, 0))[0] + (decode or (0, 0, 0))[0]
    )
