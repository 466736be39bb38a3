"""The policy for request fields that no schema has: reject the request, or drop and count them."""

import threading
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.process import log
from baton.process.clock import Clock, monotonic_clock

LOG_INTERVAL_SECONDS = 60.0  # at most one log line per interval

_log = log.get_logger("front")


class UnknownFieldPolicy(Collector):
    """The policy of --unknown-fields, for HTTP and gRPC. Thread-safe."""

    def __init__(self, *, ignored: bool = False, clock: Clock = monotonic_clock) -> None:
        self.is_ignoring = ignored
        self._clock = clock
        self._lock = threading.Lock()
        self._dropped = 0
        self._unlogged = 0
        self._next_log_at = clock()

    def count_dropped(self, fields: int) -> None:
        """Count and log dropped fields, without their names, which quote the client."""
        with self._lock:
            self._dropped += fields
            self._unlogged += fields
            now = self._clock()
            if now < self._next_log_at:
                return
            self._next_log_at = now + LOG_INTERVAL_SECONDS
            unlogged, self._unlogged = self._unlogged, 0
        _log.warning("unknown request fields ignored (--unknown-fields)", fields=unlogged)

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "baton_ignored_fields_total",
            "Unknown fields of requests that were dropped (--unknown-fields ignore)",
            value=self._dropped,
        )


REJECT_UNKNOWN_FIELDS = UnknownFieldPolicy()
