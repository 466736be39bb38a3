"""Waiting times by formula, against known values and against a simulated queue."""

import heapq
import random

import pytest

from coordinator.core.ratio.queueing import MultiServerQueue, backlog_tail, erlang_c


@pytest.mark.parametrize(
    ("places", "load", "busy"),
    [(1, 0.5, 0.5), (2, 0.5, 1 / 3), (10, 0.8, 0.4092), (100, 0.9, 0.2169), (3, 1.2, 1.0)],
)
def test_erlang_c_known_values(places: int, load: float, busy: float) -> None:
    assert erlang_c(places, load) == pytest.approx(busy, abs=1e-4)


def test_backlog_converges_below_load_one_and_grows_above() -> None:
    settled = backlog_tail(2.0, 1e6, -0.2, 0.5)
    assert settled == pytest.approx(2.718281828 ** (-2 * 0.2 * 2.0 / 0.5), rel=1e-3)
    assert backlog_tail(2.0, 1.0, -0.2, 0.5) < settled
    assert backlog_tail(9.0, 100.0, 0.1, 0.01) == pytest.approx(
        0.85, abs=0.02
    )  # 10 s behind, spread 1 s
    assert backlog_tail(1.0, 100.0, 0.1, 0.01) == pytest.approx(1.0)
    assert (backlog_tail(1.0, 5.0, 0.1, 0.0), backlog_tail(0.4, 5.0, 0.1, 0.0)) == (0.0, 1.0)


def test_extreme_inputs_do_not_overflow() -> None:
    for drift in (-50.0, -1.0, 0.0, 1.0, 50.0):
        for variance in (1e-12, 1.0, 1e6):
            for x in (0.0, 1e-6, 1.0, 1e4):
                assert 0.0 <= backlog_tail(x, 30.0, drift, variance) <= 1.0


@pytest.mark.parametrize(("places", "load"), [(1, 0.7), (3, 0.85), (6, 0.95), (4, 1.15)])
def test_wait_tail_matches_simulated_queue(places: int, load: float) -> None:
    """Exponential service times, many runs of one horizon each."""
    horizon, limits, source = 60.0, (0.5, 2.0, 5.0), random.Random(places)
    waits: list[float] = []
    for _ in range(200):
        free, now = [0.0] * places, 0.0
        while (now := now + source.expovariate(load * places)) < horizon:
            begin = max(now, free[0])
            heapq.heapreplace(free, begin + source.expovariate(1.0))
            waits.append(begin - now)
    waiting = MultiServerQueue(places, load, 1.0, 1.0, 1.0, horizon)
    for limit in limits:
        played = sum(wait > limit for wait in waits) / len(waits)
        assert waiting.wait_tail(limit) == pytest.approx(played, abs=0.1), limit
    assert waiting.wait_tail(-0.1) == 1.0
