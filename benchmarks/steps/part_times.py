"""Where the time of a repeated operation goes: its parts, each without the parts inside it."""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any


class PartTimes:
    """Adds up the time of functions that one thread calls, by the name of their part."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)  # by part
        self._inner_seconds = [0.0]  # of the calls inside each call in progress

    def reset(self) -> None:
        self.seconds.clear()

    def wrap_method(self, owner: Any, method: str, part: str) -> None:
        """Replace a method of an object by one whose time counts as `part`."""
        setattr(owner, method, self.wrap_function(getattr(owner, method), part))

    def wrap_function(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            self._inner_seconds.append(0.0)
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                seconds = time.perf_counter() - started
                self.seconds[part] += seconds - self._inner_seconds.pop()
                self._inner_seconds[-1] += seconds

        return timed
