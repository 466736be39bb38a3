"""How much work each node was given lately: seconds, each of which counts less by 1/e every `WINDOW` seconds.

Kept by forward decay (Cormode, Shkapenyuk, Srivastava, Xu, "Forward decay: a practical time decay model for streaming
systems", 2009): instead of shrinking what was added before, what is added now counts more. So sums of different nodes
compare as they stand, and nothing has to be touched as time passes.
"""

import math

WINDOW = 30.0  # seconds
_MOST = 1e100  # a unit beyond this: begin anew, before floats end


class RecentWork:
    def __init__(self) -> None:
        self._landmark = 0.0
        self._sums: dict[str, float] = {}

    def unit(self, now: float) -> float:
        """What a second of work given now adds to a sum."""
        return math.exp((now - self._landmark) / WINDOW)

    def of(self, node: str) -> float:
        return self._sums.get(node, 0.0)

    def add(self, node: str, seconds: float, now: float) -> bool:
        """True if every sum has changed, and not this node's alone."""
        if not self._sums:
            self._landmark = now
        unit = self.unit(now)
        if unit > _MOST:
            self._sums = {name: total / unit for name, total in self._sums.items()}
            self._landmark = now
        self._sums[node] = self._sums.get(node, 0.0) + seconds * self.unit(now)
        return unit > _MOST

    def forget(self, node: str) -> None:
        self._sums.pop(node, None)
