"""Requests turned away at the front doors, before the brain saw them: one count each, and a log
line at a bounded rate.

The brain counts what it refuses itself, so this wraps only what comes before it.
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
        """`tenant_class` of whoever calls, as far as that is known."""
        try:
            yield
        except RequestRejected as error:
            self._count(error, tenant_class)
            # not its message or field, which may be the client's own words
            _limited.log_event(_log.info, "refused", per=error.code, code=error.code)
            raise
