"""Requests turned away at the front doors, before the brain saw them: one log line and one count each.

The brain counts what it refuses itself, so this wraps only what comes before it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from baton import log
from baton.errors import Rejected
from coordinator.core.counters import CLASS

_log = log.get("front")


class Refusals:
    """`count(error, tenant_class)` adds one to baton_rejected_total."""

    def __init__(self, count: Callable[[Rejected, str], None]) -> None:
        self._count = count

    @contextmanager
    def counted(self, tenant_class: str = CLASS) -> Iterator[None]:
        """`tenant_class` of whoever calls, as far as that is known."""
        try:
            yield
        except Rejected as error:
            self._count(error, tenant_class)
            _log.info("refused", code=error.code)  # not its message or field, which may be the client's own words
            raise
