"""What goes first, what waits, what is dropped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_pool.core.publish_queue import PublishQueue


def test_what_is_not_paced_goes_first_and_in_order() -> None:
    queue: PublishQueue[str] = PublishQueue(10, 100.0)
    queue.offer("slow", 10, paced=True)
    queue.offer("one", 10, paced=False)
    queue.offer("two", 10, paced=False)
    assert [queue.take(0.0) for _ in range(4)] == ["one", "two", "slow", None]


def test_what_is_paced_keeps_to_its_rate() -> None:
    queue: PublishQueue[int] = PublishQueue(10, 100.0)
    for job in range(3):
        queue.offer(job, 50, paced=True)
    assert queue.take(1.0) == 0
    assert queue.take(1.4) is None
    assert queue.wait(1.4) == pytest.approx(0.1)
    assert queue.take(1.5) == 1
    assert queue.take(9.0) == 2, "a pause saves nothing up"
    assert queue.wait(9.0) is None


def test_a_job_that_is_not_paced_waits_for_no_rate() -> None:
    queue: PublishQueue[str] = PublishQueue(10, 1.0)
    queue.offer("slow", 100, paced=True)
    queue.take(0.0)
    queue.offer("prompt", 100, paced=False)
    assert queue.wait(0.0) == 0.0
    assert queue.take(0.0) == "prompt"


def test_a_full_queue_drops_what_comes() -> None:
    queue: PublishQueue[int] = PublishQueue(2, 1.0)
    assert [queue.offer(job, 1, paced=job == 1) for job in range(3)] == [True, True, False]
    assert queue.clear() == [0, 1]
    assert len(queue) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 50)), max_size=30), st.integers(1, 20))
def test_whoever_waits_as_long_as_told_gets_every_job_that_was_taken_in(
    jobs: list[tuple[bool, int]], most: int
) -> None:
    queue: PublishQueue[int] = PublishQueue(most, 10.0)
    taken = {number for number, (paced, size) in enumerate(jobs) if queue.offer(number, size, paced=paced)}
    now, got, spent = 0.0, set[int](), 0
    while (wait := queue.wait(now)) is not None:
        now += wait
        job = queue.take(now)
        assert job is not None
        got.add(job)
        spent += jobs[job][1] if jobs[job][0] else 0
    assert got == taken
    last = max((size for paced, size in jobs if paced), default=0)
    assert now >= (spent - last) / 10.0 - 1e-9
