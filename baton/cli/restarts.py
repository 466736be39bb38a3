"""When a child that died is started again, and when a stopped one is given up. Pure; seconds of any steady clock."""

FIRST_DELAY = 0.1  # seconds
LONGEST_DELAY = 2.0
SETTLED = 10.0  # a child that ran so long starts over with the first delay
FROZEN_FOR = 10.0  # a child stopped for so long is killed: it may hold blocks that nobody may reuse
MAX_FAILED_STARTS = 5  # before the cluster was ready for the first time

_STOPPED = frozenset("Tt")  # /proc/PID/stat: stopped by a signal, or by a tracer


class Restarts:
    """Exponential back-off of one child."""

    def __init__(self) -> None:
        self.failures = 0  # in a row

    def delay(self, ran: float) -> float:
        """Seconds to wait before the next start, given that the last run took `ran` seconds."""
        self.failures = 1 if ran >= SETTLED else self.failures + 1
        return float(min(LONGEST_DELAY, FIRST_DELAY * 2 ** (self.failures - 1)))


class FrozenWatch:
    """Notices that a process has been stopped at every look for FROZEN_FOR seconds."""

    def __init__(self) -> None:
        self._since: tuple[int, float] | None = None

    def frozen(self, pid: int, state: str, now: float) -> bool:
        """One look: `state` is the third field of /proc/PID/stat."""
        if state not in _STOPPED:
            self._since = None
            return False
        if self._since is None or self._since[0] != pid:
            self._since = (pid, now)
        return now - self._since[1] >= FROZEN_FOR


def state_of(stat: str) -> str:
    """The state letter in the text of /proc/PID/stat. The command before it may hold spaces and brackets."""
    return stat[stat.rindex(")") + 2]
