"""Exponentially decayed sums of recent work, by node or tenant, in seconds or tokens.

Work counts less by 1/e every `window` seconds. The sums use forward decay (Cormode, Shkapenyuk,
Srivastava, Xu, "Forward decay: a practical time decay model for streaming systems", 2009): instead
of shrinking older work, newer work counts more. So sums can be compared as they are, and no sum has
to be updated as time passes.
"""

import math

WINDOW_SECONDS = 30.0  # seconds
_MAX_WINDOWS = 200.0  # after which sums are rescaled, long before floats overflow


class RecentWork:
    def __init__(self, window: float = WINDOW_SECONDS) -> None:
        self._window = window
        self._landmark = -math.inf  # when a second of work counts 1
        self._sums: dict[str, float] = {}
        self._total = 0.0

    @property
    def total_work(self) -> float:
        return self._total

    def rescale(self, now: float) -> bool:
        """Must be called first at each moment; return whether all sums were rescaled."""
        windows = (now - self._landmark) / self._window
        if windows <= _MAX_WINDOWS:
            return False
        self._sums = {name: work * math.exp(-windows) for name, work in self._sums.items()}
        self._total = sum(self._sums.values())
        self._landmark = now
        return True

    def work_unit(self, now: float) -> float:
        """Return what a unit of work given now adds to a sum."""
        return math.exp((now - self._landmark) / self._window)

    def get_work(self, name: str) -> float:
        return self._sums.get(name, 0.0)

    def add_work(self, name: str, work: float, now: float) -> None:
        added = work * self.work_unit(now)
        self._sums[name] = self._sums.get(name, 0.0) + added
        self._total += added

    def remove_key(self, name: str) -> None:
        self._total -= self._sums.pop(name, 0.0)
        if not self._sums:
            self._total = 0.0  # and no error of rounding is left
