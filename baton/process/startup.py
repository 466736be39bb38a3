"""Measures the parts of a process's start, from its creation on."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from baton.process import log

STARTUP_EVENT = "start-up finished"  # the log line with the phases of a process
_CLOCK_TICKS_PER_SECOND = 100  # of /proc on Linux, on every architecture
_STARTTIME = 19  # of the fields behind the command name in /proc/PID/stat


class StartupTimer:
    """Divides the start of a process into phases, one after the other.

    The first phase is that of the interpreter and of the imports before `main`.
    """

    def __init__(self, clock: Callable[[], float], created_at: float) -> None:
        """`created_at` is the time on `clock`, in seconds, when the process was created."""
        self.phases: dict[str, float] = {}  # seconds by name, in order
        self._clock = clock
        self._phase_started_at = created_at

    def restart_in_child(self) -> None:
        """Measure a forked child from its fork on, unless its parent was past the first phase.

        Otherwise the child continues the start of its parent, as `baton up --detach` does.
        """
        if not self.phases:
            self._phase_started_at = self._clock()

    def end_phase(self, name: str) -> None:
        """End the current phase, which was that of `name`. Only the first call of a name counts."""
        now = self._clock()
        if name not in self.phases:
            self.phases[name] = now - self._phase_started_at
            self._phase_started_at = now

    def finish(self, name: str) -> None:
        """End the last phase, and log the seconds of each as fields."""
        self.end_phase(name)
        seconds = {f"{name}_seconds": round(taken, 3) for name, taken in self.phases.items()}
        log.get_logger("process").info(STARTUP_EVENT, **seconds)


def read_creation_time(proc: Path = Path("/proc")) -> float:
    """Return when this process was created, on the clock CLOCK_BOOTTIME; accurate to 10 ms."""
    stat = (proc / "self" / "stat").read_text()
    return int(stat[stat.rindex(")") + 2 :].split()[_STARTTIME]) / _CLOCK_TICKS_PER_SECOND


def _boot_clock() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


STARTUP = StartupTimer(_boot_clock, read_creation_time())
os.register_at_fork(after_in_child=STARTUP.restart_in_child)
