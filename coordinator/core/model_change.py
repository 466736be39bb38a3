"""Which requests bind the cluster to its model, and what becomes of the others when a node of another model joins.

A request that was placed may have shown tokens of the old model to its client, so nothing else may continue it, and
the old identity stays as long as it lives. One that was never placed binds nobody, but its prompt was encoded and
bounded for the old model, so it ends with Unavailable and its client sends it again.
"""

from collections.abc import Iterable

from baton.errors import Unavailable
from coordinator.core.record import Record
from coordinator.core.requests import RequestTable

_RETRY = 1.0  # seconds that a client is told to wait


def count_bound_requests(records: Iterable[Record]) -> int:
    """Requests of clients that were placed on nodes of the cluster's model and have not ended."""
    return sum(1 for record in records if record.attempts and not record.internal)


def end_requests_of_model(table: RequestTable, model: bytes, now: float) -> None:
    """End every request that was admitted under the identity of this digest."""
    for record in list(table.records.values()):
        if record.model == model and record.request.id in table.records:
            error = Unavailable("the cluster has begun to serve another model: send it again", retry_after=_RETRY)
            table.end(record, error, now)
