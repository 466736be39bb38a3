"""When a child that died is started again, and when one that stands still is given up. Pure;
seconds of any steady clock."""

from collections.abc import Hashable

INITIAL_DELAY = 0.1  # seconds
MAX_DELAY = 2.0
BACKOFF_RESET_SECONDS = 10.0  # a child that ran so long starts over with the first delay
FROZEN_KILL_SECONDS = (
    10.0  # a child stopped for so long is killed: it may hold blocks that nobody may reuse
)
MAX_FAILED_STARTS = 5  # before the cluster was ready for the first time
TERM_GRACE_SECONDS = 15.0  # seconds from SIGTERM to SIGKILL, beyond what a drain may take

_STOPPED_STATES = frozenset("Tt")  # /proc/PID/stat: stopped by a signal, or by a tracer


def max_stop_seconds(drain_timeout: float) -> float:
    """Seconds in which a supervisor has ended everything: the coordinator drains, the nodes drain,
    the pool ends."""
    return 2 * (drain_timeout + TERM_GRACE_SECONDS) + TERM_GRACE_SECONDS


class RestartBackoff:
    """Exponential back-off of one child."""

    def __init__(self) -> None:
        self.consecutive_failures = 0  # in a row

    def next_delay(self, ran: float) -> float:
        """Seconds to wait before the next start, given that the last run took `ran` seconds."""
        self.consecutive_failures = (
            1 if ran >= BACKOFF_RESET_SECONDS else self.consecutive_failures + 1
        )
        return float(min(MAX_DELAY, INITIAL_DELAY * 2 ** (self.consecutive_failures - 1)))


class FrozenWatch:
    """Notices that a process has been stopped at every look for FROZEN_FOR seconds."""

    def __init__(self) -> None:
        self._stopped_since: tuple[int, float] | None = None

    def check_frozen(self, pid: int, state: str, now: float) -> bool:
        """One look: `state` is the third field of /proc/PID/stat."""
        if state not in _STOPPED_STATES:
            self._stopped_since = None
            return False
        if self._stopped_since is None or self._stopped_since[0] != pid:
            self._stopped_since = (pid, now)
        return now - self._stopped_since[1] >= FROZEN_KILL_SECONDS


class LivenessWatch:
    """Notices that a process which has shown signs of life shows none any more.

    It counts looks, not seconds: a supervisor that was itself stopped, or had no processor, has
    looked as seldom as it has read signs. A process that was never heard of is still starting,
    which takes as long as it takes.
    """

    def __init__(self) -> None:
        self._process: Hashable = None
        self._has_shown_life = False
        self._silent_checks = 0

    def record_sign_of_life(self, process: Hashable) -> None:
        """A sign of life of this process came."""
        self._process, self._has_shown_life, self._silent_checks = process, True, 0

    def check_unresponsive(self, process: Hashable, state: str, looks: float) -> bool:
        """One look at it: whether this is at least the `looks`-th in a row without a sign. A
        stopped process shows none and is FrozenWatch's to judge."""
        if process != self._process or not self._has_shown_life:
            return False
        self._silent_checks = 0 if state in _STOPPED_STATES else self._silent_checks + 1
        return self._silent_checks > looks


def parse_process_state(stat: str) -> str:
    """The state letter in the text of /proc/PID/stat. The command before it may hold spaces and
    brackets."""
    return stat[stat.rindex(")") + 2]
