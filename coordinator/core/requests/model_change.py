"""Decides which requests bind the cluster to its model, and ends the others on a model change.

A request that was placed may have emitted tokens of the old model, so no other model may continue
it and the old identity stays as long as it runs. A request that was never placed binds nothing. But
its prompt was tokenized and checked for the old model, so it ends with Unavailable and its client
retries.
"""

from collections.abc import Iterable

from baton.errors import ServiceUnavailable
from coordinator.core.requests.record import RequestRecord
from coordinator.core.requests.table import RequestTable

_RETRY_AFTER_SECONDS = 1.0  # seconds after which the client may retry


def count_bound_requests(records: Iterable[RequestRecord]) -> int:
    """Count the clients' requests that were placed under the cluster's model and have not ended."""
    return sum(1 for record in records if record.attempt_count and not record.is_internal)


def end_requests_of_model(table: RequestTable, model: bytes, now: float) -> None:
    """End every request that was admitted for the model with this digest."""
    for record in list(table.records.values()):
        if record.identity_digest == model and record.request.id in table.records:
            error = ServiceUnavailable(
                "the cluster has begun to serve another model: send it again",
                retry_after=_RETRY_AFTER_SECONDS,
            )
            table.end_request(record, error, now)
