"""When a dead child is restarted, and when a frozen or silent one is ended. Pure.

Times are seconds of any monotonic clock.
"""

from collections.abc import Hashable

INITIAL_DELAY = 0.1  # seconds
MAX_DELAY = 2.0
BACKOFF_RESET_SECONDS = 10.0  # a child that ran so long restarts after INITIAL_DELAY
# A child that has been stopped for so long is killed: it may hold blocks that cannot be reused.
FROZEN_KILL_SECONDS = 10.0
MAX_FAILED_STARTS = 5  # of one child, before the cluster is ready for the first time
TERM_GRACE_SECONDS = 15.0  # seconds from SIGTERM to SIGKILL, beyond what a drain may take

_STOPPED_STATES = frozenset("Tt")  # /proc/PID/stat: stopped by a signal, or by a tracer


def max_stop_seconds(drain_timeout: float) -> float:
    """Return the longest time a supervisor takes to stop the cluster.

    The coordinator drains, then the nodes drain, then the pool ends.
    """
    return 2 * (drain_timeout + TERM_GRACE_SECONDS) + TERM_GRACE_SECONDS


class RestartBackoff:
    """Exponential back-off of the restarts of one child."""

    def __init__(self) -> None:
        self.consecutive_failures = 0

    def next_delay(self, run_seconds: float) -> float:
        """Return the seconds to wait before the next start; the last run took `run_seconds`."""
        self.consecutive_failures = (
            1 if run_seconds >= BACKOFF_RESET_SECONDS else self.consecutive_failures + 1
        )
        return float(min(MAX_DELAY, INITIAL_DELAY * 2 ** (self.consecutive_failures - 1)))


class FrozenWatch:
    """Notices a process that every check in FROZEN_KILL_SECONDS has seen stopped."""

    def __init__(self) -> None:
        self._stopped_since: tuple[int, float] | None = None

    def check_frozen(self, pid: int, state: str, now: float) -> bool:
        """Check once; `state` is the third field of /proc/PID/stat."""
        if state not in _STOPPED_STATES:
            self._stopped_since = None
            return False
        if self._stopped_since is None or self._stopped_since[0] != pid:
            self._stopped_since = (pid, now)
        return now - self._stopped_since[1] >= FROZEN_KILL_SECONDS


class LivenessWatch:
    """Notices a process that has shown signs of life and shows none any more.

    It counts checks, not seconds: a supervisor that was itself stopped or had no CPU has read the
    signs as seldom as it has checked. A process that has shown no sign yet is still starting, which
    may take any time.
    """

    def __init__(self) -> None:
        self._process: Hashable = None
        self._has_shown_life = False
        self._silent_checks = 0

    def record_sign_of_life(self, process: Hashable) -> None:
        """Record a sign of life of this process."""
        self._process, self._has_shown_life, self._silent_checks = process, True, 0

    def check_unresponsive(self, process: Hashable, state: str, max_silent_checks: float) -> bool:
        """Check once; return whether more than `max_silent_checks` in a row saw no sign of life.

        A stopped process shows no sign and is left to FrozenWatch.
        """
        if process != self._process or not self._has_shown_life:
            return False
        self._silent_checks = 0 if state in _STOPPED_STATES else self._silent_checks + 1
        return self._silent_checks > max_silent_checks


def parse_process_state(stat: str) -> str:
    """Return the state letter in the text of /proc/PID/stat.

    The command name before it may contain spaces and parentheses.
    """
    return stat[stat.rindex(")") + 2]
