"""What goes first, what waits, what is dropped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_pool.core.client.publish_queue import PublishQueue


def test_unpaced_jobs_go_first_in_order() -> None:
    queue: PublishQueue[str] = PublishQueue(10, 100.0)
    queue.add_job("slow", 10, paced=True)
    queue.add_job("one", 10, paced=False)
    queue.add_job("two", 10, paced=False)
    assert [queue.take_ready_job(0.0) for _ in range(4)] == ["one", "two", "slow", None]


def test_paced_jobs_keep_to_their_rate() -> None:
    queue: PublishQueue[int] = PublishQueue(10, 100.0)
    for job in range(3):
        queue.add_job(job, 50, paced=True)
    assert queue.take_ready_job(1.0) == 0
    assert queue.take_ready_job(1.4) is None
    assert queue.seconds_until_ready(1.4) == pytest.approx(0.1)
    assert queue.take_ready_job(1.5) == 1
    assert queue.take_ready_job(9.0) == 2, "a pause saves nothing up"
    assert queue.seconds_until_ready(9.0) is None


def test_unpaced_job_ignores_the_rate() -> None:
    queue: PublishQueue[str] = PublishQueue(10, 1.0)
    queue.add_job("slow", 100, paced=True)
    queue.take_ready_job(0.0)
    queue.add_job("prompt", 100, paced=False)
    assert queue.seconds_until_ready(0.0) == 0.0
    assert queue.take_ready_job(0.0) == "prompt"


def test_full_queue_drops_new_jobs() -> None:
    queue: PublishQueue[int] = PublishQueue(2, 1.0)
    assert [queue.add_job(job, 1, paced=job == 1) for job in range(3)] == [True, True, False]
    assert queue.clear() == [0, 1]
    assert len(queue) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 50)), max_size=30), st.integers(1, 20))
def test_waiting_as_told_yields_every_accepted_job(jobs: list[tuple[bool, int]], most: int) -> None:
    queue: PublishQueue[int] = PublishQueue(most, 10.0)
    taken = {
        number
        for number, (paced, size) in enumerate(jobs)
        if queue.add_job(number, size, paced=paced)
    }
    now, got, spent = 0.0, set[int](), 0
    while (wait := queue.seconds_until_ready(now)) is not None:
        now += wait
        job = queue.take_ready_job(now)
        assert job is not None
        got.add(job)
        spent += jobs[job][1] if jobs[job][0] else 0
    assert got == taken
    last = max((size for paced, size in jobs if paced), default=0)
    assert now >= (spent - last) / 10.0 - 1e-9
