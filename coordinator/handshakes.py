"""Handshakes on the cluster port that come to nothing. gRPC ends them by itself and tells nobody, but it says when one
begins; one after which no stream comes has failed."""

import asyncio
from collections import deque
from collections.abc import Callable

from baton import log
from baton.connection_limits import LINES_PER_SECOND
from baton.grpc_limits import HANDSHAKE_SECONDS
from baton.process.log_rate import RateLimitedLog

PATIENCE = HANDSHAKE_SECONDS + 5.0  # until the stream has begun, too

_log = log.get("node_link")


class Handshakes:
    """Of one port. `count_failures` is called on the event loop that made this, with how many have failed."""

    def __init__(self, count_failures: Callable[[int], None], patience: float) -> None:
        self._count_failures = count_failures
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._begun: deque[float] = deque()  # when; which is whose nobody can tell, and only the count matters
        self._timer: asyncio.TimerHandle | None = None
        self._limited = RateLimitedLog(burst=1, per_second=LINES_PER_SECOND)
        self._failed = 0  # in all

    def begin(self) -> None:
        """On any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begin)

    def complete(self) -> None:
        """A stream has come."""
        if self._begun:
            self._begun.popleft()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _begin(self) -> None:
        self._begun.append(self._loop.time())
        if self._timer is None:
            self._timer = self._loop.call_later(self._patience, self._give_up)

    def _give_up(self) -> None:
        overdue, failed = self._loop.time() - self._patience, 0
        while self._begun and self._begun[0] <= overdue:
            self._begun.popleft()
            failed += 1
        self._timer = self._loop.call_at(self._begun[0] + self._patience, self._give_up) if self._begun else None
        if failed:
            self._count_failures(failed)
            self._failed += failed
            self._limited.write(
                _log.warning,
                "wrong cluster token, or no node of this cluster: connections to the cluster port were refused",
                connections=self._failed,
            )
