"""When the thread that launches a copy waits for its end itself. No GPU: events are scripted."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kv_transfer.device import cuda_launches
from kv_transfer.device.cuda_launches import LaunchQueue


class ScriptedEvent:
    """Ends after so many queries; each takes a tenth of what is a brief time."""

    def __init__(self, clock: list[float], queries: int) -> None:
        self._clock = clock
        self._left = queries
        self.num_queries = 0

    def query(self) -> bool:
        self.num_queries += 1
        self._clock[0] += cuda_launches._BRIEF_SECONDS / 10
        self._left -= 1
        return self._left <= 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(cuda_launches, "monotonic_clock", lambda: now[0])
    return now


@pytest.fixture
def launches() -> Iterator[LaunchQueue]:
    queue = LaunchQueue("test-launches", [])
    yield queue
    queue.ends.close()


def wait(launches: LaunchQueue, clock: list[float], queries: int) -> tuple[bool, int]:
    """Whether it waited to the end, and how often it asked."""
    event: Any = ScriptedEvent(clock, queries)
    return launches.wait_briefly(event), event.num_queries


def test_a_short_launch_is_waited_for(launches: LaunchQueue, clock: list[float]) -> None:
    assert wait(launches, clock, 1) == (True, 1)
    assert wait(launches, clock, 5) == (True, 5)


def test_after_a_long_launch_the_next_ones_are_left_to_the_other_thread(
    launches: LaunchQueue, clock: list[float]
) -> None:
    has_ended, queries = wait(launches, clock, 1000)
    assert not has_ended
    assert 9 <= queries <= 11
    for _ in range(cuda_launches._LAUNCHES_AFTER_LONG_ONE):
        assert wait(launches, clock, 1) == (False, 0)
    assert wait(launches, clock, 1) == (True, 1)


def test_a_launch_behind_one_that_is_left_to_the_other_thread_is_left_to_it_too(
    launches: LaunchQueue, clock: list[float]
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    ended = threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(30)

    launches.ends.put(work)
    assert begun.wait(30)
    assert wait(launches, clock, 1) == (False, 0)
    launches.ends.put(ended.set)
    assert wait(launches, clock, 1) == (False, 0)
    may_end.set()
    assert ended.wait(30)
    while not launches.ends.is_idle:  # its counter is raised after the work
        ended.wait(0.001)
    assert wait(launches, clock, 1) == (True, 1)
