"""Requests that no present node can hold wait outside the queue, so that they block nobody."""

from collections.abc import Iterable, Mapping

from baton.errors import BatonError, DeadlineExceeded, ServiceUnavailable
from baton.types import RequestId
from coordinator.core.admission.waiting_queue import WaitingQueue
from coordinator.core.common.settings import QueueLimits
from coordinator.core.placement.context_capacity import ContextCapacity
from coordinator.core.requests.record import RequestRecord

_RETRY_AFTER_SECONDS = 1.0  # what the client is told to wait before it tries again


class OversizedRequests:
    """Parks requests that no present node can hold until a larger node joins or they expire.
    Requests that were never placed are bounded, in number and prompt tokens, like the queue; others
    are bounded by what nodes had begun."""

    def __init__(
        self,
        records: Mapping[RequestId, RequestRecord],
        queue: WaitingQueue,
        capacity: ContextCapacity,
        limits: QueueLimits,
    ) -> None:
        self._records = records
        self._queue = queue
        self._capacity = capacity
        self._limits = limits
        self._held: set[RequestId] = set()

    def hold_request(self, record: RequestRecord) -> BatonError | None:
        """Park a request that is too long (see `ContextCapacity`). If too many are parked, return
        the error with which it must end instead."""
        if not record.attempt_count and (why := self._why_full(record)):
            too_long = self._capacity.why_too_long(record)
            return ServiceUnavailable(
                f"{too_long}, and {why} already wait for a larger one",
                retry_after=_RETRY_AFTER_SECONDS,
            )
        self._held.add(record.request.id)
        self._queue.park_request(record.request.id)
        return None

    def release_fitting(self) -> None:
        """Return requests to the queue that a node can hold now."""
        for request in self._list_fitting():
            self._held.discard(request)
            self._queue.unpark_request(request)

    def forget_request(self, request: RequestId) -> None:
        """The request has ended. Idempotent."""
        self._held.discard(request)

    def deadline_error(self, record: RequestRecord) -> BatonError:
        """Return the error for a request that has timed out: it is not the client's fault if no
        node could hold the request."""
        given = f"{record.request.timeout_seconds:g} s that its client or --request-timeout gave it"
        if record.request.id in self._held and (why := self._capacity.why_too_long(record)):
            return ServiceUnavailable(
                f"{why}, and no larger one came in the {given}", retry_after=_RETRY_AFTER_SECONDS
            )
        return DeadlineExceeded(f"the request took longer than the {given}")

    def _why_full(self, record: RequestRecord) -> str:
        held = [self._records[request].request for request in self._held]
        if len(held) >= self._limits.max_requests:
            return f"{len(held)} requests (--max-queue)"
        tokens = sum(len(request.prompt_token_ids) for request in held)
        full = held and tokens + len(record.request.prompt_token_ids) > self._limits.max_tokens
        return f"{tokens} prompt tokens (--max-queue-tokens)" if full else ""

    def _list_fitting(self) -> Iterable[RequestId]:
        return [
            request
            for request in self._held
            if not self._capacity.why_too_long(self._records[request])
        ]
