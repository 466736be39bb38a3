"""Timelines: the stages of a request until its first token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.types import NodeName, RequestId
from coordinator.core.common.timeline import Timeline
from coordinator.core.requests.explain import TimelineStore
from coordinator.core.requests.record import Timestamps

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
def test_stages_follow_from_the_recorded_moments(
    marks: Timestamps, stages: tuple[float, ...]
) -> None:
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
    requests = [RequestId(f"r{number}") for number in range(3)]
    for request in requests:
        ring.add_timeline(request, Timeline(attempts=1))
    assert ring.get(requests[0]) is None
    assert ring.get(requests[2]) is not None
