import os
from pathlib import Path

import pytest

from baton.cli.restarts import FROZEN_FOR, LONGEST_DELAY, SETTLED, FrozenWatch, Restarts, state_of


def test_delays_double_up_to_a_bound_and_start_over_after_a_good_run() -> None:
    restarts = Restarts()
    assert [restarts.delay(0.0) for _ in range(7)] == [0.1, 0.2, 0.4, 0.8, 1.6, LONGEST_DELAY, LONGEST_DELAY]
    assert restarts.delay(SETTLED) == 0.1
    assert restarts.delay(SETTLED - 0.1) == 0.2


@pytest.mark.parametrize("state", ["T", "t"])
def test_a_process_stopped_at_every_look_is_frozen(state: str) -> None:
    watch = FrozenWatch()
    looks = [watch.frozen(1, state, now) for now in (100.0, 101.0, 100.0 + FROZEN_FOR - 0.1, 100.0 + FROZEN_FOR)]
    assert looks == [False, False, False, True]


def test_going_on_for_a_moment_starts_the_time_over() -> None:
    watch = FrozenWatch()
    assert not watch.frozen(1, "T", 0.0)
    assert not watch.frozen(1, "S", 5.0)
    assert not watch.frozen(1, "T", 6.0)
    assert not watch.frozen(1, "T", 6.0 + FROZEN_FOR - 1)
    assert watch.frozen(1, "T", 6.0 + FROZEN_FOR)


def test_a_new_process_does_not_inherit_the_time_of_the_last() -> None:
    watch = FrozenWatch()
    watch.frozen(1, "T", 0.0)
    assert not watch.frozen(2, "T", FROZEN_FOR)


def test_the_state_is_found_behind_any_name() -> None:
    assert state_of("1234 (a) S (b)) T 1 1 1") == "T"
    assert state_of(Path(f"/proc/{os.getpid()}/stat").read_text()) == "R"
