"""Log lines that a stranger can cause are limited in their rate: a flood of refusals must not
become one of lines."""

import threading
from collections.abc import Callable
from typing import Any

from baton.process.clock import Clock, monotonic_clock

DEFAULT_BURST = 10  # lines of one kind at once
DEFAULT_LINES_PER_SECOND = 1.0
_MAX_KINDS = 128
_OVERFLOW_KIND = "others"


class RateLimitedLogger:
    """A token bucket for each kind of line. The next line of a kind that is let through says how
    many were left out before it, as `left_out`. Any thread may write."""

    def __init__(
        self,
        clock: Clock = monotonic_clock,
        *,
        burst: int = DEFAULT_BURST,
        per_second: float = DEFAULT_LINES_PER_SECOND,
    ) -> None:
        self._clock = clock
        self._burst = burst
        self._per_second = per_second
        self._lock = threading.Lock()  # guards the next
        self._kinds: dict[str, _LineBucket] = {}

    def log_event(
        self, say: Callable[..., Any], event: str, *, per: str = "", **fields: Any
    ) -> None:
        """Call `say(event, **fields)`, unless lines of this kind come too fast. `per` divides an
        event into kinds."""
        with self._lock:
            left_out = self._admit(f"{event} {per}")
        if left_out is None:
            return
        if left_out:
            fields["left_out"] = left_out
        say(event, **fields)

    def _admit(self, kind: str) -> int | None:
        """How many of this kind were left out since the last one; None to leave this one out
        too."""
        now = self._clock()
        bucket = self._kinds.get(kind)
        if bucket is None:
            if len(self._kinds) >= _MAX_KINDS:
                kind = _OVERFLOW_KIND
            bucket = self._kinds.setdefault(kind, _LineBucket(float(self._burst), now))
        bucket.level = min(
            self._burst, bucket.level + self._per_second * max(0.0, now - bucket.updated_at)
        )
        bucket.updated_at = now
        if bucket.level < 1.0:
            bucket.suppressed += 1
            return None
        bucket.level -= 1.0
        left_out, bucket.suppressed = bucket.suppressed, 0
        return left_out


class _LineBucket:
    __slots__ = ("level", "suppressed", "updated_at")

    def __init__(self, level: float, at: float) -> None:
        self.level = level
        self.updated_at = at
        self.suppressed = 0
