"""Counts failed TLS handshakes on the cluster port.

gRPC does not report failed handshakes, but it reports when one starts. A handshake that no stream
follows within STREAM_OPEN_TIMEOUT_SECONDS has failed.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from baton.network.connection_limits import LOG_LINES_PER_SECOND
from baton.network.grpc_options import HANDSHAKE_TIMEOUT_SECONDS
from baton.process import log
from baton.process.log_rate_limit import RateLimitedLogger

STREAM_OPEN_TIMEOUT_SECONDS = HANDSHAKE_TIMEOUT_SECONDS + 5.0  # including the opening of the stream

_log = log.get_logger("node_link")


class HandshakeMonitor:
    """Watches the handshakes of one port."""

    def __init__(self, count_failures: Callable[[int], None], timeout_seconds: float) -> None:
        """`count_failures` is called on the current event loop with the number of new failures."""
        self._count_failures = count_failures
        self._timeout_seconds = timeout_seconds
        self._loop = asyncio.get_running_loop()
        # Start times of handshakes that no stream has followed yet. A stream cannot be matched with
        # its own handshake, but only the number of failures matters.
        self._started_at: deque[float] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._limited = RateLimitedLogger(burst=1, per_second=LOG_LINES_PER_SECOND)
        self._failed_handshakes = 0  # total

    def on_handshake_started(self) -> None:
        """A handshake has started. Called on any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._record_start)

    def on_stream_opened(self) -> None:
        """A stream has been opened, so one handshake has succeeded."""
        if self._started_at:
            self._started_at.popleft()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _record_start(self) -> None:
        self._started_at.append(self._loop.time())
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_seconds, self._expire_overdue)

    def _expire_overdue(self) -> None:
        overdue, failed = self._loop.time() - self._timeout_seconds, 0
        while self._started_at and self._started_at[0] <= overdue:
            self._started_at.popleft()
            failed += 1
        self._timer = (
            self._loop.call_at(self._started_at[0] + self._timeout_seconds, self._expire_overdue)
            if self._started_at
            else None
        )
        if failed:
            self._count_failures(failed)
            self._failed_handshakes += failed
            self._limited.log_event(
                _log.warning,
                "tls handshake failed on the cluster port: wrong cluster token, or not a node",
                connections=self._failed_handshakes,
            )
