"""A bound on how often one kind of line is logged, whatever an outsider does to provoke it."""

from baton.clock import Clock, steady

LOG_INTERVAL = 10.0  # seconds


class LogRate:
    """One line every `interval` seconds."""

    def __init__(self, interval: float = LOG_INTERVAL, clock: Clock = steady) -> None:
        self._interval = interval
        self._clock = clock
        self._next = float("-inf")
        self._withheld = 0

    def admit(self) -> int | None:
        """None if the line is to be left out; else how many were since the last one."""
        now = self._clock()
        if now < self._next:
            self._withheld += 1
            return None
        self._next = now + self._interval
        withheld, self._withheld = self._withheld, 0
        return withheld
