"""Validates submitted requests and adds them to the request table."""

from collections.abc import Sequence
from dataclasses import replace

from baton.errors import (
    InvalidRequest,
    Overloaded,
    RequestRejected,
    ServiceUnavailable,
    ShuttingDown,
    TenantLimitExceeded,
)
from baton.limits import ModelBounds, check_context_length
from baton.types import Principal, Request
from coordinator.core.admission.admission_controller import AdmissionRequest
from coordinator.core.admission.degradation import DegradationStep
from coordinator.core.common.counters import INTERNAL_CLASS, Counters
from coordinator.core.common.settings import BrainSettings
from coordinator.core.placement.services import PlacementServices
from coordinator.core.requests.table import ADMIT_TIMEOUT_SECONDS, RequestTable


class RequestAdmitter:
    """Validates requests and adds them to the table; rejects all of them while `is_draining`."""

    def __init__(
        self,
        table: RequestTable,
        placement: PlacementServices,
        counters: Counters,
        settings: BrainSettings,
    ) -> None:
        self.is_draining = False
        self._table = table
        self._placement = placement
        self._counters = counters
        self._settings = settings

    def admit_requests(self, requests: Sequence[Request], now: float, *, internal: bool) -> None:
        """Admit all requests, in this order, or raise the error with which all are rejected."""
        try:
            self._check_room(requests, now)
            bounds = self.model_bounds()
            for request in requests:
                check_context_length(
                    len(request.prompt_token_ids), request.sampling.max_tokens, bounds
                )
        except RequestRejected as error:
            self.count_rejection(
                error, INTERNAL_CLASS if internal else requests[0].principal.tenant_class, now
            )
            raise
        if not internal:
            requests = [self._cap_output(request) for request in requests]
        records = [self._table.add_request(request, now, internal=internal) for request in requests]
        records[0].sibling_requests = tuple(record.request.id for record in records[1:])

    def check_admission(
        self, principal: Principal, count: int, timeout_seconds: float, now: float
    ) -> None:
        """Raise ShuttingDown, Overloaded or InvalidRequest unless `count` requests would be
        admitted whose prompts are not known yet; not counted."""
        self._check_admission(principal, AdmissionRequest(count, timeout_seconds), now)

    def count_rejection(self, error: RequestRejected, tenant_class: str, now: float) -> None:
        """Count a rejected request. One rejected for lack of room still counts as demand."""
        self._counters.rejected[error.code, tenant_class] += 1
        no_room = isinstance(error, Overloaded) and not isinstance(error, TenantLimitExceeded)
        if no_room and tenant_class != INTERNAL_CLASS:
            self._placement.state.workload_meter.record_rejection(now)

    def model_bounds(self) -> ModelBounds:
        """Return the bounds of requests. Raises ServiceUnavailable before the first join."""
        bounds = self._placement.capacity.get_model_bounds()
        if bounds is None:
            raise ServiceUnavailable(
                "no node has joined the cluster yet", retry_after=ADMIT_TIMEOUT_SECONDS
            )
        return bounds

    def _check_admission(
        self, principal: Principal, admission: AdmissionRequest, now: float
    ) -> None:
        if self.is_draining:
            raise ShuttingDown("the cluster is stopping and takes no new requests")
        limit = self._settings.max_queue
        if admission.request_count > limit:
            raise InvalidRequest(
                f"{admission.request_count} outputs are requested at once, the limit is {limit}"
                " (--max-queue)",
                param="n",
            )
        self._placement.admission.check_admission(principal, admission, now)

    def _check_room(self, requests: Sequence[Request], now: float) -> None:
        tokens = sum(len(request.prompt_token_ids) for request in requests)
        longest = max(request.sampling.max_tokens for request in requests)
        self._check_admission(
            requests[0].principal,
            AdmissionRequest(len(requests), requests[0].timeout_seconds, tokens, longest),
            now,
        )

    def _cap_output(self, request: Request) -> Request:
        """Cap the output length while that degradation step is taken."""
        sampling, max_tokens = request.sampling, self._settings.degraded_max_tokens
        if (
            DegradationStep.CAPPED_OUTPUT not in self._placement.degradation.active_steps
            or sampling.max_tokens <= max_tokens
        ):
            return request
        capped = replace(
            sampling, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens)
        )
        return replace(request, sampling=capped)
