"""When the ratio is changed by itself, and when it is not: demand as it is measured, time turned by hand. How the
requests fare is in test_auto_simulated.py."""

import random

import pytest

from baton.ratio import Split
from baton.slo import Slo
from coordinator.core.steering import CALM_LOOKS, ENOUGH, FAST, LOOK, LOOKS, MEMORY, REST, REVERSAL, Sight, Steering
from coordinator.core.workload import Asked, Stages, WorkloadMeter
from tests.unit.coordinator_core.test_forecast import EIGHT, MACHINE, SLO

PROMPTS, ANSWERS = (7.0, Asked(680, 16.0)), (13.0, Asked(115, 120.0))


class Helm:
    """Demand and the ratio, which changes as soon as it is told to."""

    def __init__(self, split: Split, slo: Slo = SLO) -> None:
        self.meter = WorkloadMeter()
        self.steering = Steering(slo, 0.0)
        self.now = 0.0
        self.split = split
        self.moving = 0
        self.waiting: list[tuple[float, Asked]] = []
        self.moves: list[tuple[float, Split]] = []
        self._source = random.Random(1)

    def ask(self, load: tuple[float, Asked], seconds: float, *, good: bool | None = None) -> None:
        """So much is asked from now on, and looks are taken as they are due. `good`: how it is served, if at all."""
        rate, one = load
        end, at = self.now + seconds, self.now + self._source.expovariate(rate)
        while min(at, self.steering.due) <= end:
            self.now = min(at, self.steering.due)
            if self.now < at:
                self.look()
                continue
            self.meter.arrived(one.prompt, one.output, at)
            if good is not None:
                self.meter.ended(0.5 if good else 9.0, 0.02, Stages(), at)
            at += self._source.expovariate(rate)
        self.now = end

    def look(self) -> None:
        sight = Sight(self.split, self.moving, EIGHT, MACHINE, self.waiting)
        wanted = self.steering.look(sight, self.meter, self.now)
        if wanted is not None:
            self.moves.append((self.now, wanted))
            self.split = wanted


def test_what_is_kept_is_left_alone() -> None:
    helm = Helm(Split(7, 1))
    helm.ask(PROMPTS, 120.0, good=True)
    assert helm.moves == []
    assert helm.steering.reason.startswith("kept: ")
    assert "100% were" in helm.steering.reason


def test_a_load_that_turns_moves_the_ratio_once_it_is_confirmed() -> None:
    helm = Helm(Split(7, 1))
    helm.ask(PROMPTS, 120.0, good=True)
    helm.ask(ANSWERS, 60.0, good=False)
    assert 1 <= len(helm.moves) <= 4
    assert 120.0 + LOOK <= helm.moves[0][0] <= 120.0 + 4 * LOOK
    assert helm.split in (Split(2, 6), Split(3, 5))
    prefill = [7, *(split.prefill for _, split in helm.moves)]
    assert prefill == sorted(prefill, reverse=True), "never back on its way"
    assert all(later - earlier >= REST for (earlier, _), (later, _) in zip(helm.moves, helm.moves[1:], strict=False))


@pytest.mark.parametrize(("good", "looks"), [(False, LOOKS), (True, CALM_LOOKS)])
def test_one_look_is_not_enough(good: bool, looks: int) -> None:
    """The first is the first that saw enough. As long as all is served well there is time for more."""
    helm = Helm(Split(7, 1))
    helm.ask(ANSWERS, 40.0, good=good)
    first, _ = helm.moves[0]
    assert first == pytest.approx(looks * LOOK)


def test_nodes_on_their_way_count_as_there_and_nothing_else_is_decided() -> None:
    helm = Helm(Split(2, 6))
    helm.moving = 3
    helm.ask(PROMPTS, 60.0, good=False)
    assert helm.moves == []
    assert helm.steering.reason == "3 nodes are on their way to 2:6 and count as there"
    helm.moving = 0
    helm.ask(PROMPTS, REST - 1.0, good=False)
    assert helm.moves == [], "it rests from when they were there"
    assert "of rest are left" in helm.steering.reason or "confirmed" in helm.steering.reason
    helm.ask(PROMPTS, REST, good=False)
    assert len(helm.moves) == 1


def test_too_few_requests_say_nothing() -> None:
    helm = Helm(Split(1, 7))
    helm.ask((0.6 * ENOUGH / FAST, PROMPTS[1]), 120.0, good=False)
    assert helm.moves == []
    assert helm.steering.reason.endswith(f"requests in {FAST:g} s say too little")


def test_what_no_split_mends_is_no_reason_to_move() -> None:
    helm = Helm(Split(7, 1))
    helm.ask(PROMPTS, 60.0, good=False)
    assert helm.moves == []
    assert helm.steering.reason.startswith("missed, and no split is predicted to do much better")


def test_what_waits_is_asked_for() -> None:
    """A line of long prompts from before needs prefill nodes, though short ones are asked now."""
    helm = Helm(Split(2, 6))
    easy = (5.0, Asked(100, 20.0))
    helm.ask(easy, 30.0, good=True)
    assert helm.moves == []
    helm.waiting = [(0.0, Asked(1500, 10.0))] * 40
    helm.ask(easy, 15.0, good=False)
    assert helm.split.prefill > 4


def test_a_load_that_swings_is_not_followed_to_and_fro() -> None:
    """Twenty seconds of each: it learns that within a few swings, and keeps what serves the whole."""
    helm = Helm(Split(4, 4))
    for _ in range(15):
        helm.ask((6.0, PROMPTS[1]), 20.0)
        helm.ask((11.0, ANSWERS[1]), 20.0)
    assert len(helm.moves) <= 6
    assert all(at < 300.0 for at, _ in helm.moves), "and none in the second half"
    assert 3 <= helm.split.prefill <= 5


def test_phases_that_last_are_followed() -> None:
    helm = Helm(Split(4, 4))
    seen = []
    for _ in range(3):
        for load in (PROMPTS, ANSWERS):
            helm.ask(load, 300.0)
            seen.append(helm.split.prefill)
    assert [prefill >= 6 for prefill in seen] == [True, False] * 3
    assert [prefill <= 3 for prefill in seen] == [False, True] * 3


def test_changes_back_need_a_longer_rest_each_time() -> None:
    steering = Steering(SLO, 0.0)
    steering._direction, steering._over = 1, 100.0
    assert [steering._swings(direction, 150.0) for direction in (1, -1)] == [0, 1]
    steering._reversals.extend((150.0, 220.0))
    assert [steering._swings(direction, 300.0) for direction in (1, -1)] == [2, 2], "90 s after, it is no swing"
    assert steering._swings(-1, 151.0 + MEMORY) == 1
    assert REVERSAL > REST
