"""A field that no schema has: the request is refused, or the field is dropped and counted."""

import threading
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.process import log
from baton.process.clock import Clock, monotonic_clock

LOG_INTERVAL_SECONDS = 60.0  # at most one line in so many seconds

_log = log.get_logger("front")


class UnknownFieldPolicy(Collector):
    """The policy of --unknown-fields, for both front doors. Threads may share it."""

    def __init__(self, *, ignored: bool = False, clock: Clock = monotonic_clock) -> None:
        self.is_ignoring = ignored
        self._clock = clock
        self._lock = threading.Lock()
        self._dropped = 0
        self._unlogged = 0
        self._next_log_at = clock()

    def count_dropped(self, fields: int) -> None:
        """Their names are the client's own words, so neither a metric nor a log has them."""
        with self._lock:
            self._dropped += fields
            self._unlogged += fields
            now = self._clock()
            if now < self._next_log_at:
                return
            self._next_log_at = now + LOG_INTERVAL_SECONDS
            unlogged, self._unlogged = self._unlogged, 0
        _log.warning("unknown fields of requests ignored (--unknown-fields)", fields=unlogged)

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "baton_ignored_fields_total",
            "Unknown fields of requests that were dropped (--unknown-fields ignore)",
            value=self._dropped,
        )


REJECT_UNKNOWN_FIELDS = UnknownFieldPolicy()
