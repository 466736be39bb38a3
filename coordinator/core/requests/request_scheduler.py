"""Admits submitted requests to the request table, and places waiting ones on nodes.

Waiting requests are placed whenever something has changed for them, in the order of the queue. The
nodes that were considered for an attempt are kept in its trace.
"""

from collections.abc import Sequence
from dataclasses import replace

from baton.cluster_link.messages import DecodeOrder, PrefillOrder
from baton.errors import (
    InvalidRequest,
    Overloaded,
    RequestRejected,
    ServiceUnavailable,
    ShuttingDown,
    TenantLimitExceeded,
)
from baton.limits import ModelBounds, check_context_length
from baton.types import AttemptKey, Principal, Request, Role
from coordinator.core.admission.admission_controller import AdmissionRequest
from coordinator.core.admission.degradation import DegradationStep
from coordinator.core.common.counters import INTERNAL_CLASS, Counters
from coordinator.core.common.effects import EffectLog, PlacementSignal, RequestTimers
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.placement.interface import PlacementDecision
from coordinator.core.placement.services import PlacementServices
from coordinator.core.requests.attempt_trace import AttemptTrace
from coordinator.core.requests.record import Attempt, RequestRecord, RequestState
from coordinator.core.requests.table import (
    ADMIT_TIMEOUT_SECONDS,
    RESTART_SECONDS,
    ProgressClock,
    RequestTable,
)
from coordinator.core.requests.waiting_requests import WaitingRequests

_Flow = tuple[int, str]  # priority level and tenant


class RequestAdmitter:
    """Validates requests and adds them to the table; rejects all of them while `is_draining`."""

    def __init__(
        self,
        table: RequestTable,
        placement: PlacementServices,
        counters: Counters,
        *,
        max_queue: int,
        degraded_max_tokens: int,
    ) -> None:
        """`degraded_max_tokens`: cap of outputs while that degradation step is taken."""
        self.is_draining = False
        self._table = table
        self._placement = placement
        self._counters = counters
        self._max_queue = max_queue
        self._degraded_max_tokens = degraded_max_tokens

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
            raise ShuttingDown(
                "the cluster is stopping and takes no new requests", retry_after=RESTART_SECONDS
            )
        limit = self._max_queue
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
        sampling, max_tokens = request.sampling, self._degraded_max_tokens
        if (
            DegradationStep.CAPPED_OUTPUT not in self._placement.degradation.active_steps
            or sampling.max_tokens <= max_tokens
        ):
            return request
        capped = replace(
            sampling, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens)
        )
        return replace(request, sampling=capped)


class AttemptStarter:
    """Starts attempts: books them on their nodes and sends the orders."""

    def __init__(
        self,
        registry: NodeRegistry,
        placement: PlacementServices,
        *,
        timers: RequestTimers,
        counters: Counters,
        effects: EffectLog,
        progress: ProgressClock,
        reserve_timeout: float,
    ) -> None:
        """`reserve_timeout`: seconds in which a decode node must answer an order with a writer."""
        self._registry = registry
        self._placement = placement
        self._timers = timers
        self._counters = counters
        self._effects = effects
        self._progress = progress
        self._reserve_timeout = reserve_timeout

    def start_attempt(
        self, record: RequestRecord, decision: PlacementDecision, now: float
    ) -> Attempt:
        """Start the next attempt of the request on the chosen nodes."""
        record.attempt_count += 1
        request, prefill, decode = record.request, decision.choice.prefill, decision.choice.decode
        key = AttemptKey(request.id, record.attempt_count, request.choice_index)
        trace = self._start_trace(decision, now)
        attempt = Attempt(key, prefill, decode, trace)
        record.begin_attempt(attempt)
        attempt.legs.update(filter(None, (decode, prefill)))
        self._placement.placer.book_legs(record, key, decision, now)
        self._counters.placements[decision.prefill_site.value, decision.reason.value] += 1
        record.set_state(RequestState.PLACED)
        models = [
            self._registry.nodes[node].model_digest.hex()
            for node in (prefill, decode)
            if node is not None
        ]
        record.timestamps.mark_placed(now, trace.prefill_node, trace.decode_node, models)
        self._send_orders(record, attempt, decision, now)
        trace.held_back_seconds, record.held_back_seconds = record.held_back_seconds, 0.0
        pair, breakers = attempt.node_pair, self._placement.breakers
        if pair is not None and pair in breakers.failing_pairs:
            trace.is_breaker_probe = breakers.try_start_probe(pair, key)
        if record.attempt_count == 1:
            self._progress.record_progress(now)
        return attempt

    def _start_trace(self, decision: PlacementDecision, now: float) -> AttemptTrace:
        choice, name = decision.choice, self._registry.name_of
        return AttemptTrace(
            name(choice.prefill),
            name(choice.decode),
            now,
            decision.demand.context_tokens,
            self._placement.placer.list_considered(decision),
            decision.prediction,
            decision.prefill_site,
            decision.reason,
            decision.rejected_prediction,
        )

    def _send_orders(
        self, record: RequestRecord, attempt: Attempt, decision: PlacementDecision, now: float
    ) -> None:
        placer, prefill, decode = self._placement.placer, attempt.prefill, attempt.decode
        work = record.make_attempt_spec(attempt.key, now)
        remote_prefixes = placer.find_remote_prefixes(record, decision)
        if decode is not None:
            writer = self._registry.nodes[prefill].address if prefill is not None else None
            share = placer.get_local_prefill_share(decision.demand)
            self._effects.send_order(
                decode, DecodeOrder(work, writer, share, remote_prefixes.get(decode))
            )
        if prefill is not None:
            self._effects.send_order(
                prefill,
                PrefillOrder(
                    work,
                    needs_no_decode=decode is None,
                    remote_prefix=remote_prefixes.get(prefill),
                ),
            )
            if decode is not None:
                attempt.reserve_deadline = now + self._reserve_timeout
                self._timers.set_timer(record.request.id, record.next_timer_at())


class PlacementLoop:
    """Admits and places waiting requests after something has changed for them."""

    def __init__(
        self,
        registry: NodeRegistry,
        table: RequestTable,
        placement: PlacementServices,
        waiting: WaitingRequests,
        signal: PlacementSignal,
        starter: AttemptStarter,
    ) -> None:
        self._registry = registry
        self._table = table
        self._placement = placement
        self._waiting = waiting
        self._signal = signal
        self._starter = starter
        self._has_left_requests = False  # waiting, after the last pass

    def place_waiting_requests(self, now: float) -> None:
        """Admit and place whatever can be, if anything has changed since the last call."""
        retries, oversized = self._waiting.retries, self._waiting.oversized
        if retries.held_back_since and retries.release_within_budget(now):
            self._signal.request_pass()
        if not self._signal.take_request():
            return
        if oversized.held:
            oversized.release_fitting()
        if self._table.unadmitted and not self._registry.why_unavailable(Role.DECODE):
            self._admit_waiting()
        while self._waiting.queue and self._place_next(now):
            pass
        self._has_left_requests = bool(self._waiting.queue)

    def _admit_waiting(self) -> None:
        for record in list(self._table.unadmitted.values()):
            if not self._placement.capacity.why_too_long(record):
                self._table.admit_request(record)

    def _place_next(self, now: float) -> bool:
        """Place or end the first candidate that allows it; return whether one was found."""
        views = self._placement.placer.list_node_views(now)
        is_decode_full = self._placement.latency_estimator.is_decode_full()
        smallest = min((view.max_context_tokens for view in views), default=0)
        passed_over: set[_Flow] = set()  # whose first request leaves headroom to others
        for request in self._waiting.queue.list_candidates() if self._registry.nodes else ():
            record = self._table.records[request]
            if self._end_or_park(record, smallest, now):
                return True
            if is_decode_full and record.remaining_tokens > 1 and record.probe_node is None:
                continue  # the usual case under load
            headroom = self._placement.admission.headroom_share(request, now)
            principal = record.request.principal
            flow = principal.priority_level, principal.tenant
            if headroom and flow in passed_over:
                continue  # a later request of the same tenant would not be placed either
            decision = self._placement.placer.decide_placement(record, views, now, headroom)
            if decision is not None:
                self._start_attempt(record, decision, passed_over, now)
                return True
            if headroom:
                passed_over.add(flow)
        return False

    def _end_or_park(self, record: RequestRecord, smallest: int, now: float) -> bool:
        """End the request if its deadline cannot be met; park it if no present node can hold it.
        `smallest` is the longest request that every node can hold, in tokens. Return whether either
        was done."""
        # Requests that arrive together, such as the choices of one, may all find a place at once.
        has_rivals = self._has_left_requests and len(self._waiting.queue) > 1
        late = self._placement.placer.find_deadline_error(record, now, has_rivals=has_rivals)
        if late is not None:
            self._table.end_request(record, late, now)
            return True
        if (
            record.max_total_tokens > smallest
            and record.probe_node is None
            and self._placement.capacity.why_too_long(record)
        ):
            error = self._waiting.oversized.hold_request(record)
            if error is not None:
                self._table.end_request(record, error, now)
            return True
        return False

    def _start_attempt(
        self,
        record: RequestRecord,
        decision: PlacementDecision,
        passed_over: set[_Flow],
        now: float,
    ) -> None:
        request, level = record.request.id, record.request.principal.priority_level
        yielding = [tenant for other, tenant in passed_over if other == level]
        self._waiting.queue.take_request(request, now, yielding)
        if request in self._table.unadmitted:
            # one token alone: a prefill node can serve it while there is no decode node
            self._table.admit_request(record)
        attempt = self._starter.start_attempt(record, decision, now)
        if record.prefix_holder is not None and attempt.decode not in (None, record.prefix_holder):
            self._waiting.followers.reassign_followers(record)
