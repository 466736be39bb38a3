import os
from pathlib import Path

import pytest

from baton.cli.supervisor.restart_policy import (
    BACKOFF_RESET_SECONDS,
    FROZEN_KILL_SECONDS,
    MAX_DELAY,
    FrozenWatch,
    RestartBackoff,
    parse_process_state,
)


def test_delays_double_up_to_a_bound_and_start_over_after_a_good_run() -> None:
    restarts = RestartBackoff()
    assert [restarts.next_delay(0.0) for _ in range(7)] == [
        0.1,
        0.2,
        0.4,
        0.8,
        1.6,
        MAX_DELAY,
        MAX_DELAY,
    ]
    assert restarts.next_delay(BACKOFF_RESET_SECONDS) == 0.1
    assert restarts.next_delay(BACKOFF_RESET_SECONDS - 0.1) == 0.2


@pytest.mark.parametrize("state", ["T", "t"])
def test_a_process_stopped_at_every_look_is_frozen(state: str) -> None:
    watch = FrozenWatch()
    looks = [
        watch.check_frozen(1, state, now)
        for now in (100.0, 101.0, 100.0 + FROZEN_KILL_SECONDS - 0.1, 100.0 + FROZEN_KILL_SECONDS)
    ]
    assert looks == [False, False, False, True]


def test_running_again_resets_the_frozen_time() -> None:
    watch = FrozenWatch()
    assert not watch.check_frozen(1, "T", 0.0)
    assert not watch.check_frozen(1, "S", 5.0)
    assert not watch.check_frozen(1, "T", 6.0)
    assert not watch.check_frozen(1, "T", 6.0 + FROZEN_KILL_SECONDS - 1)
    assert watch.check_frozen(1, "T", 6.0 + FROZEN_KILL_SECONDS)


def test_a_new_process_does_not_inherit_the_time_of_the_last() -> None:
    watch = FrozenWatch()
    watch.check_frozen(1, "T", 0.0)
    assert not watch.check_frozen(2, "T", FROZEN_KILL_SECONDS)


def test_the_state_is_found_behind_any_name() -> None:
    assert parse_process_state("1234 (a) S (b)) T 1 1 1") == "T"
    assert parse_process_state(Path(f"/proc/{os.getpid()}/stat").read_text()) == "R"
