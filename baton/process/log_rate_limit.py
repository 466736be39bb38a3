"""Limits the rate of log lines that clients can cause, such as refused requests."""

import threading
from collections.abc import Callable
from typing import Any

from baton.process.clock import Clock, monotonic_clock

DEFAULT_BURST = 10  # lines of one kind at once
DEFAULT_LINES_PER_SECOND = 1.0
_MAX_KINDS = 128
_OVERFLOW_KIND = "others"


class RateLimitedLogger:
    """Limits log lines with a token bucket for each kind of line. Thread-safe.

    The field `left_out` of a line says how many of its kind were suppressed before it.
    """

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
        self._lock = threading.Lock()  # guards _kinds
        self._kinds: dict[str, _LineBucket] = {}

    def log_event(
        self, log_method: Callable[..., Any], event: str, *, rate_limit_key: str = "", **fields: Any
    ) -> None:
        """Call `log_method(event, **fields)`, unless its kind has used up its rate.

        Lines of equal `event` and `rate_limit_key` are of one kind.
        """
        with self._lock:
            left_out = self._admit(f"{event} {rate_limit_key}")
        if left_out is None:
            return
        if left_out:
            fields["left_out"] = left_out
        log_method(event, **fields)

    def _admit(self, kind: str) -> int | None:
        """Return how many lines of this kind were suppressed since the last one.

        Returns None if this line must be suppressed as well.
        """
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

    def __init__(self, level: float, now: float) -> None:
        self.level = level  # lines that may be written now
        self.updated_at = now
        self.suppressed = 0  # lines since the last one that was written
