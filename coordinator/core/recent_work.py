"""How much work each node was given lately: seconds, each of which counts less by 1/e every `WINDOW` seconds.

Kept by forward decay (Cormode, Shkapenyuk, Srivastava, Xu, "Forward decay: a practical time decay model for streaming
systems", 2009): instead of shrinking what was added before, what is added now counts more. So sums of different nodes
compare as they stand, and nothing has to be touched as time passes.
"""

import math

WINDOW = 30.0  # seconds
_LONGEST = 200.0  # windows after which the scale is chosen anew, long before floats end


class RecentWork:
    def __init__(self) -> None:
        self._landmark = -math.inf  # when a second of work counts 1
        self._sums: dict[str, float] = {}

    def keep_scale(self, now: float) -> bool:
        """To be called before anything else at a moment. True if every sum has changed: the scale is another one."""
        windows = (now - self._landmark) / WINDOW
        if windows <= _LONGEST:
            return False
        self._sums = {node: total * math.exp(-windows) for node, total in self._sums.items()}
        self._landmark = now
        return True

    def unit(self, now: float) -> float:
        """What a second of work given now adds to a sum."""
        return math.exp((now - self._landmark) / WINDOW)

    def of(self, node: str) -> float:
        return self._sums.get(node, 0.0)

    def add(self, node: str, seconds: float, now: float) -> None:
        self._sums[node] = self._sums.get(node, 0.0) + seconds * self.unit(now)

    def forget(self, node: str) -> None:
        self._sums.pop(node, None)
