"""When the ratio is changed by itself, and when it is not: demand as it is measured, time turned by hand. How the
requests fare is in test_steered_loads.py and test_auto_simulated.py."""

import random

from baton.ratio import Split
from baton.slo import Slo
from coordinator.core.steering import ENOUGH, FAST, PAUSE, REST, Sight, Steering, _Bet
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
    assert 120.0 < helm.moves[0][0] <= 140.0
    assert helm.split in (Split(2, 6), Split(3, 5), Split(4, 4))
    prefill = [7, *(split.prefill for _, split in helm.moves)]
    assert prefill == sorted(prefill, reverse=True), "never back on its way"
    assert all(later - earlier >= REST for (earlier, _), (later, _) in zip(helm.moves, helm.moves[1:], strict=False))


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


def test_phases_that_last_are_followed() -> None:
    helm = Helm(Split(4, 4))
    seen = []
    for _ in range(3):
        for load in (PROMPTS, ANSWERS):
            helm.ask(load, 300.0)
            seen.append(helm.split.prefill)
    assert [prefill >= 6 for prefill in seen] == [True, False] * 3
    assert [prefill <= 3 for prefill in seen] == [False, True] * 3


def bets(steering: Steering, saved: int, count: int) -> list[float]:
    """Bets on more prefill nodes that are taken back after they have saved so many requests: how long each pause is."""
    pauses = []
    for _ in range(count):
        steering._bet = _Bet(Split(4, 4), price=40.0, saved=saved)
        steering._settle(Split(6, 2), Split(5, 3), 1000.0)
        pauses.append(steering._paused - 1000.0)
    return pauses


def test_bets_that_have_not_paid_pause_them_longer_each_time() -> None:
    steering = Steering(SLO, 0.0)
    assert bets(steering, 39, 5) == [PAUSE, 2 * PAUSE, 4 * PAUSE, 8 * PAUSE, 8 * PAUSE]
    bets(steering, 40, 1)
    assert bets(steering, 39, 1) == [PAUSE], "one that has paid makes up for them"


def test_a_change_further_on_does_not_settle_a_bet() -> None:
    steering = Steering(SLO, 0.0)
    steering._bet = bet = _Bet(Split(4, 4), price=40.0)
    steering._settle(Split(5, 3), Split(6, 2), 10.0)
    assert steering._bet is bet
    assert steering._paused == 0.0
