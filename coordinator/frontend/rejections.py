"""Counts and logs requests that a front end rejects before it submits them.

The brain counts what it rejects itself. Log lines are rate limited.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from baton.errors import RequestRejected
from baton.process import log
from baton.process.log_rate_limit import RateLimitedLogger
from coordinator.core.common.counters import DEFAULT_TENANT_CLASS

_log = log.get_logger("front")
_limited = RateLimitedLogger()


class RejectionCounter:
    """`count(error, tenant_class)` adds one to baton_rejected_total."""

    def __init__(self, count: Callable[[RequestRejected, str], None]) -> None:
        self._count = count

    @contextmanager
    def count_rejections(self, tenant_class: str = DEFAULT_TENANT_CLASS) -> Iterator[None]:
        """Count a RequestRejected that the block raises, under the caller's class if known."""
        try:
            yield
        except RequestRejected as error:
            self._count(error, tenant_class)
            # neither message nor field name: both may quote the client
            _limited.log_event(_log.info, "request rejected", per=error.code, code=error.code)
            raise
