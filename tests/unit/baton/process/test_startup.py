"""The phases of a process's start."""

import gc
import time

import pytest

from baton.process import log
from baton.process.runtime import collector_paused
from baton.process.startup import STARTUP_EVENT, StartupTimer, read_creation_time


class StepClock:
    """Shows the times that it was given, one after the other."""

    def __init__(self, *times: float) -> None:
        self._times = list(times)

    def __call__(self) -> float:
        return self._times.pop(0)


def test_phases_follow_each_other_from_the_creation_of_the_process() -> None:
    timer = StartupTimer(StepClock(12.0, 12.5, 15.5), created_at=10.0)
    for name in ("imports", "settings", "model"):
        timer.end_phase(name)
    assert timer.phases == {"imports": 2.0, "settings": 0.5, "model": 3.0}


def test_a_phase_ends_once() -> None:
    """A command that has imported everything calls the main function of another process."""
    timer = StartupTimer(StepClock(1.0, 2.0, 4.0), created_at=0.0)
    for name in ("imports", "imports", "settings"):
        timer.end_phase(name)
    assert timer.phases == {"imports": 1.0, "settings": 3.0}


def test_a_forked_process_is_measured_from_its_fork() -> None:
    """A server that forks processes has imported everything long before."""
    timer = StartupTimer(StepClock(300.0, 300.5, 301.5, 302.0), created_at=10.0)
    timer.restart_in_child()
    timer.end_phase("imports")
    timer.end_phase("settings")
    timer.restart_in_child()  # a daemon continues the start of the command
    timer.end_phase("preparation")
    assert timer.phases == {"imports": 0.5, "settings": 1.0, "preparation": 0.5}


def test_the_log_line_has_all_phases(capfd: pytest.CaptureFixture[str]) -> None:
    timer = StartupTimer(StepClock(1.0, 2.25), created_at=0.0)
    timer.end_phase("imports")
    timer.finish("ports")
    log.flush_log()
    written = capfd.readouterr()
    line = next(line for line in (written.out + written.err).split("\n") if STARTUP_EVENT in line)
    assert "imports_seconds" in line
    assert "ports_seconds" in line
    assert "1.25" in line


def test_this_process_was_created_in_the_past() -> None:
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert 0.0 < read_creation_time() <= now


def test_the_collector_pauses_and_forgets_what_was_allocated_meanwhile() -> None:
    before = gc.get_freeze_count()
    try:
        with collector_paused():
            assert not gc.isenabled()
            kept = [[number] for number in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(kept)
    finally:
        gc.unfreeze()
