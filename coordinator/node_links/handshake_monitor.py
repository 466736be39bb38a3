"""Handshakes on the cluster port that come to nothing. gRPC ends them by itself and tells nobody,
but it says when one begins; one after which no stream comes has failed."""

import asyncio
from collections import deque
from collections.abc import Callable

from baton.network.connection_limits import LOG_LINES_PER_SECOND
from baton.network.grpc_options import HANDSHAKE_TIMEOUT_SECONDS
from baton.process import log
from baton.process.log_rate_limit import RateLimitedLogger

STREAM_OPEN_TIMEOUT_SECONDS = HANDSHAKE_TIMEOUT_SECONDS + 5.0  # until the stream has begun, too

_log = log.get_logger("node_link")


class HandshakeMonitor:
    """Of one port. `count_failures` is called on the event loop that made this, with how many have
    failed."""

    def __init__(self, count_failures: Callable[[int], None], patience: float) -> None:
        self._count_failures = count_failures
        self._timeout_seconds = patience
        self._loop = asyncio.get_running_loop()
        self._started_at: deque[float] = (
            deque()
        )  # when; which is whose nobody can tell, and only the count matters
        self._timer: asyncio.TimerHandle | None = None
        self._limited = RateLimitedLogger(burst=1, per_second=LOG_LINES_PER_SECOND)
        self._failed_handshakes = 0  # in all

    def on_handshake_started(self) -> None:
        """On any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._record_start)

    def on_stream_opened(self) -> None:
        """A stream has come."""
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
                "wrong cluster token, or no node of this cluster: connections to the cluster "
                "port were refused",
                connections=self._failed_handshakes,
            )
