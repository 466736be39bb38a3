"""Which requests bind the cluster to its model, and what becomes of the others when a node of
another model joins.

A request that was placed may have shown tokens of the old model to its client, so nothing else may
continue it, and the old identity stays as long as it lives. One that was never placed binds nobody,
but its prompt was encoded and bounded for the old model, so it ends with Unavailable and its client
sends it again.
"""

from collections.abc import Iterable

from baton.errors import ServiceUnavailable
from coordinator.core.requests.record import RequestRecord
from coordinator.core.requests.table import RequestTable

_RETRY_AFTER_SECONDS = 1.0  # seconds that a client is told to wait


def count_bound_requests(records: Iterable[RequestRecord]) -> int:
    """Requests of clients that were placed on nodes of the cluster's model and have not ended."""
    return sum(1 for record in records if record.attempt_count and not record.is_internal)


def end_requests_of_model(table: RequestTable, model: bytes, now: float) -> None:
    """End every request that was admitted under the identity of this digest."""
    for record in list(table.records.values()):
        if record.identity_digest == model and record.request.id in table.records:
            error = ServiceUnavailable(
                "the cluster has begun to serve another model: send it again",
                retry_after=_RETRY_AFTER_SECONDS,
            )
            table.end_request(record, error, now)
