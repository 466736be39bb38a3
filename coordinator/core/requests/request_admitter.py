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
from coordinator.core.common.counters import INTERNAL_CLASS
from coordinator.core.common.settings import BrainSettings
from coordinator.core.requests.table import ADMIT_TIMEOUT_SECONDS, RequestTable


class RequestAdmitter:
    """Admits nothing while `is_draining`."""

    def __init__(self, table: RequestTable, settings: BrainSettings) -> None:
        self.is_draining = False
        self._table = table
        self._settings = settings

    def admit_requests(self, requests: Sequence[Request], now: float, *, internal: bool) -> None:
        """Admit all requests or none: see `Brain.submit_requests`."""
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

    def check_admission(self, standing: Principal, bid: AdmissionRequest, now: float) -> None:
        """Raise ShuttingDown, Overloaded or InvalidRequest unless the request would be admitted;
        not counted."""
        if self.is_draining:
            raise ShuttingDown("the cluster is stopping and takes no new requests")
        limit = self._settings.max_queue
        if bid.request_count > limit:
            raise InvalidRequest(
                f"{bid.request_count} outputs are requested at once, the limit is {limit}"
                " (--max-queue)",
                param="n",
            )
        self._table.admission.check_admission(standing, bid, now)

    def count_rejection(self, error: RequestRejected, tenant_class: str, now: float) -> None:
        """Count a rejected request. One rejected for lack of room still counts as demand."""
        self._table.counters.rejected[error.code, tenant_class] += 1
        no_room = isinstance(error, Overloaded) and not isinstance(error, TenantLimitExceeded)
        if no_room and tenant_class != INTERNAL_CLASS:
            self._table.placement_state.workload_meter.record_rejection(now)

    def model_bounds(self) -> ModelBounds:
        """Return the bounds of requests. Raises ServiceUnavailable before the first join."""
        bounds = self._table.context_capacity.get_model_bounds()
        if bounds is None:
            raise ServiceUnavailable(
                "no node has joined the cluster yet", retry_after=ADMIT_TIMEOUT_SECONDS
            )
        return bounds

    def _check_room(self, requests: Sequence[Request], now: float) -> None:
        tokens = sum(len(request.prompt_token_ids) for request in requests)
        longest = max(request.sampling.max_tokens for request in requests)
        self.check_admission(
            requests[0].principal,
            AdmissionRequest(len(requests), requests[0].timeout_seconds, tokens, longest),
            now,
        )

    def _cap_output(self, request: Request) -> Request:
        """Cap the output length while that degradation step is taken."""
        most, sampling = self._settings.degraded_max_tokens, request.sampling
        if (
            DegradationStep.CAPPED_OUTPUT not in self._table.degradation
            or sampling.max_tokens <= most
        ):
            return request
        capped = replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))
        return replace(request, sampling=capped)
