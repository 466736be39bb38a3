"""Which thread waits for the end of a launch. Events are scripted: no GPU is needed."""

import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from kv_transfer.device import cuda_launches
from kv_transfer.device.cuda_launches import (
    LaunchQueue,
    LaunchStreams,
    LayerSpan,
    QueuedLaunch,
    split_layers,
)
from tests.device_events import FixedEvent


class ScriptedEvent:
    """Ends after so many queries; each takes a tenth of what is a brief time."""

    def __init__(self, clock: list[float], queries: int) -> None:
        self._clock = clock
        self._left = queries
        self.num_queries = 0
        self.may_end = threading.Event()
        self.error: RuntimeError | None = None

    def synchronize(self) -> None:
        if self.error is not None:
            raise self.error
        self.may_end.wait(0.05)

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
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
    no_stream: Any = None
    queue = LaunchQueue("test-launches", LaunchStreams(no_stream, []))
    yield queue
    queue.close()


class Launches:
    """Launches of a queue, and what was passed on of each, with the thread that did it."""

    def __init__(self, queue: LaunchQueue, clock: list[float]) -> None:
        self.passed_on: SimpleQueue[tuple[object, int]] = SimpleQueue()
        self._queue = queue
        self._clock = clock

    def add(self, number: int, queries: int, after: ScriptedEvent | None = None) -> ScriptedEvent:
        event = ScriptedEvent(self._clock, queries)
        ended: Any = event
        self._queue.add_launch(
            QueuedLaunch(
                ended, lambda: self._pass_on(number), self._pass_on, kept=None, after=after
            )
        )
        return event

    def expect(self, *numbers: int) -> set[int]:
        """Wait for results in this order; returns the threads that passed them on."""
        found = [self.passed_on.get(timeout=30) for _ in numbers]
        assert [number for number, _ in found] == list(numbers)
        return {thread for _, thread in found}

    def _pass_on(self, result: object) -> None:
        self.passed_on.put((result, threading.get_ident()))


@pytest.fixture
def made(launches: LaunchQueue, clock: list[float]) -> Launches:
    return Launches(launches, clock)


def test_short_launches_are_finished_by_the_thread_that_launches(
    launches: LaunchQueue, made: Launches
) -> None:
    for number, queries in enumerate((1, 3, 2)):
        made.add(number, queries)
    launches.pass_on_ends()
    assert made.passed_on.qsize() == 3
    assert made.expect(0, 1, 2) == {threading.get_ident()}


def test_a_long_launch_and_those_behind_it_are_left_to_the_thread(
    launches: LaunchQueue, made: Launches
) -> None:
    made.add(0, 2)
    long = made.add(1, 1000)
    made.add(2, 1)
    launches.pass_on_ends()
    assert made.expect(0) == {threading.get_ident()}
    assert 7 <= long.num_queries <= 9
    assert threading.get_ident() not in made.expect(1, 2)


def test_after_a_long_launch_the_next_turns_are_left_to_the_thread(
    launches: LaunchQueue, made: Launches
) -> None:
    made.add(0, 1000)
    launches.pass_on_ends()
    made.expect(0)
    for number in range(cuda_launches._TURNS_AFTER_LONG_LAUNCH):
        event = made.add(number, 1)
        launches.pass_on_ends()
        launches.pass_on_ends()  # a turn without launches does not count
        assert event.num_queries == 0
        made.expect(number)
    while not launches._ends.is_idle:  # its counter is raised after the result is passed on
        time.sleep(0.001)
    made.add(7, 1)
    launches.pass_on_ends()
    assert made.expect(7) == {threading.get_ident()}


def test_results_keep_their_order_behind_launches_of_the_thread(
    launches: LaunchQueue, made: Launches, clock: list[float]
) -> None:
    blocked = made.add(0, 1000)
    launches.pass_on_ends()
    launches._turns_to_skip = 0
    second = made.add(1, 1)
    launches.pass_on_ends()
    assert second.num_queries == 0
    blocked.may_end.set()
    made.expect(0, 1)


def test_nobody_waits_for_a_launch_that_waits_for_an_event(
    launches: LaunchQueue, made: Launches, clock: list[float]
) -> None:
    computed = ScriptedEvent(clock, queries=3)
    later = made.add(0, 1, computed)
    made.add(1, 1)
    launches.pass_on_ends()
    assert made.expect(1) == {threading.get_ident()}
    launches.pass_on_ends()
    assert later.num_queries == 0
    assert made.passed_on.empty()
    launches.pass_on_ends()
    assert made.expect(0) == {threading.get_ident()}


def test_launches_that_wait_for_events_are_passed_on_at_close(
    launches: LaunchQueue, made: Launches, clock: list[float]
) -> None:
    made.add(0, 1, ScriptedEvent(clock, queries=1000))
    launches.pass_on_ends()
    launches.close()
    made.expect(0)


def test_a_failed_device_is_passed_on(
    launches: LaunchQueue, made: Launches, clock: list[float]
) -> None:
    made.add(0, 3).error = RuntimeError("CUDA error: unspecified launch failure")
    launches.pass_on_ends()
    error, _ = made.passed_on.get(timeout=30)
    assert "unspecified launch failure" in str(error)
    computed = ScriptedEvent(clock, 1)
    computed.error = RuntimeError("CUDA error: unspecified launch failure")
    made.add(1, 3, computed).error = computed.error
    launches.pass_on_ends()
    error, _ = made.passed_on.get(timeout=30)
    assert "unspecified launch failure" in str(error)


_BYTES = cuda_launches._MIN_LAUNCH_BYTES
PASSED = FixedEvent(has_passed=True)


def make_pending() -> FixedEvent:
    return FixedEvent(has_passed=False)


def test_layers_that_are_final_are_copied_by_one_launch() -> None:
    assert split_layers(5, _BYTES, []) == [LayerSpan(5)]
    assert split_layers(5, _BYTES, [PASSED] * 5) == [LayerSpan(5)]


def test_each_large_layer_waits_for_its_own_end() -> None:
    ends = [PASSED, PASSED, make_pending(), make_pending()]
    spans = [LayerSpan(2), LayerSpan(1, ends[2]), LayerSpan(1, ends[3])]
    assert split_layers(4, _BYTES, ends) == spans


def test_small_layers_wait_for_the_last_one_of_a_launch() -> None:
    ends = [make_pending() for _ in range(8)]
    spans = [LayerSpan(3, ends[2]), LayerSpan(3, ends[5]), LayerSpan(2, ends[7])]
    assert split_layers(8, _BYTES // 3 + 1, ends) == spans
    assert split_layers(8, _BYTES // 3 - 1, ends) == [
        LayerSpan(4, ends[3]),
        LayerSpan(4, ends[7]),
    ]


def test_waiting_launches_of_one_hand_off_share_a_stream() -> None:
    upload: Any = None
    ready: Any = ["ready 0", "ready 1"]
    waiting: Any = ["waiting 0", "waiting 1", "waiting 2"]
    queue = LaunchQueue("test-streams", LaunchStreams(upload, ready, waiting))
    try:
        chosen = {queue.choose_stream([4, 5], is_waiting=True) for _ in range(4)}
        assert len(chosen) == 1
        all_chosen = {queue.choose_stream([block], is_waiting=True) for block in range(64)}
        assert all_chosen == set(waiting)
        assert [queue.choose_stream([4], is_waiting=False) for _ in range(3)] == [*ready, ready[0]]
    finally:
        queue.close()
