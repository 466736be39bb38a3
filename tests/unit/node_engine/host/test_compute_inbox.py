"""How many items the compute thread handles between two steps."""

from types import SimpleNamespace
from typing import Any

import pytest

from node_engine.host.compute_thread import ComputeInbox, ComputeThread, StopCompute
from node_engine.paced.costs import ZERO_COSTS
from node_engine.paced.paced_engine import PacedEngine

ITEM_SECONDS = 0.003


class ManualClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class RecordingRole:
    """Takes a while to handle an item."""

    num_held_attempts = 1

    def __init__(self, clock: ManualClock) -> None:
        self.handled: list[object] = []
        self._clock = clock

    def handle_item(self, item: object) -> None:
        self._clock.now += ITEM_SECONDS
        self.handled.append(item)


class Bench:
    """A compute thread that is not started."""

    def __init__(self) -> None:
        clock = ManualClock()
        self.role = RecordingRole(clock)
        scheduler = SimpleNamespace(capacity=SimpleNamespace(get_load=lambda: None))
        context: Any = SimpleNamespace(scheduler=scheduler, engine=PacedEngine(ZERO_COSTS))
        self.inbox: ComputeInbox[Any] = ComputeInbox()
        self.thread = ComputeThread(context, self.inbox, clock, self.inbox.put)
        role: Any = self.role
        self.thread._role = role

    def handle_inbox(self, *, wait: bool, last_step: float = 0.0) -> bool:
        self.thread._last_step_seconds = last_step
        return self.thread._handle_inbox(wait=wait)


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    for number in range(9):
        made.inbox.put(number)
    return made


@pytest.mark.parametrize(
    ("last_step", "handled"), [(0.0, 1), (0.5 * ITEM_SECONDS, 1), (3.5 * ITEM_SECONDS, 4)]
)
def test_items_between_two_steps_take_as_long_as_a_step(
    bench: Bench, last_step: float, handled: int
) -> None:
    assert bench.handle_inbox(wait=False, last_step=last_step)
    assert bench.role.handled == list(range(handled))


def test_items_that_were_left_are_handled_first_and_all_without_a_step(bench: Bench) -> None:
    bench.handle_inbox(wait=False, last_step=1.5 * ITEM_SECONDS)
    bench.inbox.put("later")
    assert bench.handle_inbox(wait=True)  # does not wait: there are items
    assert bench.role.handled == [*range(9), "later"]


def test_the_end_comes_after_the_items_before_it(bench: Bench) -> None:
    bench.inbox.put(StopCompute())
    turns = 1
    while bench.handle_inbox(wait=False, last_step=1.5 * ITEM_SECONDS):
        turns += 1
    assert bench.role.handled == list(range(9))
    assert turns == 5
