"""Every request that has not ended, and the transitions that it can take.

Three rules hold for every input: a request ends only in `end_request`; a failed attempt goes on
only in `replace_attempt`; a leg is closed only in `close_leg`, or falls with its node in
`on_node_lost`.
"""

from baton.cluster_link.messages import CancelOrder, TicketOrder
from baton.errors import (
    BatonError,
    Cancelled,
    NodeDrained,
    NodeLost,
    NodeStalled,
    Preempted,
    ServiceUnavailable,
)
from baton.types import (
    AttemptKey,
    FinishReason,
    Incarnation,
    NodeName,
    Request,
    RequestId,
    Role,
    TokenLogprobs,
)
from coordinator.core.admission.admission_controller import AdmissionController
from coordinator.core.admission.degradation import DegradationController
from coordinator.core.admission.waiting_queue import WaitingQueue
from coordinator.core.common.counters import Counters
from coordinator.core.common.effects import (
    AttemptReplaced,
    BreakerChanged,
    EffectLog,
    EmitPromptLogprobs,
    EmitTokens,
)
from coordinator.core.common.settings import BrainSettings, retry_backoff_seconds
from coordinator.core.common.timers import RequestTimers
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.placement.breakers import CircuitBreakers, NodePair
from coordinator.core.placement.disaggregation import LatencyEstimator
from coordinator.core.placement.interface import PlacementPolicy
from coordinator.core.placement.node_loads import ContextCapacity, NodeLoads
from coordinator.core.placement.placement_state import PlacementState
from coordinator.core.placement.request_placer import RequestPlacer
from coordinator.core.requests.attempt_trace import REFUSED, SERVED, Timestamps
from coordinator.core.requests.explain import EndedRequests
from coordinator.core.requests.parked_requests import OversizedRequests, PrefixFollowers
from coordinator.core.requests.record import (
    Attempt,
    RequestRecord,
    RequestState,
    count_token_sources,
)
from coordinator.core.requests.retries import RetryBudget, RetryScheduler

ADMIT_TIMEOUT_SECONDS = 1.0  # how long a new request waits for nodes that can serve it


class RequestTable:
    """Owns the request records and the parts that they share."""

    def __init__(
        self, registry: NodeRegistry, placement: PlacementPolicy, settings: BrainSettings
    ) -> None:
        self.records: dict[RequestId, RequestRecord] = {}
        self.queue = WaitingQueue()
        self.loads = NodeLoads()
        self.timers = RequestTimers()
        self.counters = Counters()
        self.effects = EffectLog()
        self.ended_probes: list[
            tuple[RequestId, FinishReason | BatonError]
        ] = []  # probes that have ended
        self.last_progress_at = (
            0.0  # when a request got further than it had been, or the first of those here came
        )
        self.needs_placement = False  # something has changed since placement was last tried
        self.placement_state = PlacementState(registry)
        self.context_capacity = ContextCapacity(registry, hands_off=settings.mode != "colocated")
        self.oversized = OversizedRequests(
            self.records, self.queue, self.context_capacity, settings.queue_limits
        )
        self.ended_requests = EndedRequests(
            self.counters, self.placement_state.workload_meter, settings.explain_keep
        )
        self.latency_estimator = LatencyEstimator(
            registry, self.loads, self.placement_state.cost_model, self.placement_state.decode_times
        )
        self.degradation = DegradationController()
        self.admission = AdmissionController(
            self.queue, settings.queue_limits, self.latency_estimator, self.degradation
        )
        self.breakers = CircuitBreakers()
        budget = RetryBudget(settings.retry_budget_share)
        self.retries = RetryScheduler(
            self.records, self.queue, self.timers, budget, settings.max_queue
        )
        self.placer = RequestPlacer(
            registry,
            self.loads,
            placement,
            self.placement_state,
            self.admission,
            self.latency_estimator,
            self.breakers,
            self.degradation,
            settings.mode,
            settings.local_prefill_share,
        )
        self._registry = registry
        self._settings = settings
        self.followers = PrefixFollowers(self.records, self.queue)
        self.unadmitted: set[RequestId] = set()  # not accepted yet: no node can serve them

    def wake_placement(self) -> None:
        """Request a new attempt to place waiting requests, before effects are taken."""
        self.needs_placement = True

    def next_due_times(self) -> tuple[float | None, ...]:
        """Return the times at which the brain must tick for these parts."""
        degradation = self.degradation.next_sample_at(waiting=len(self.queue) > 0)
        return (
            self.timers.next_timer_at(),
            self.breakers.next_half_open_at(),
            self.retries.next_release_at(),
            degradation,
        )

    def add_request(self, request: Request, now: float, *, internal: bool) -> RequestRecord:
        """Add a request that was admitted. A leader that has ended is ignored."""
        record = RequestRecord(
            request,
            now + request.timeout_seconds,
            Timestamps(now),
            internal,
            identity_digest=self._registry.model_digest,
        )
        if len(request.prompt_token_ids) == 1:
            record.prompt_logprobs = ()
        if not self.records:
            self.last_progress_at = now
        self.records[request.id] = record
        self.retries.budget.record_request(now)
        self.queue.add_request(request.id, self.admission.admit_request(request, now))
        if not internal:
            self.placement_state.workload_meter.record_arrival(
                len(request.prompt_token_ids),
                self.placement_state.expected_output_tokens(request),
                now,
            )
        leader = self.records.get(request.leader_id) if request.leader_id is not None else None
        if leader is not None:
            self.followers.add_follower(record, leader)
        record.admit_deadline = now + ADMIT_TIMEOUT_SECONDS
        self.unadmitted.add(request.id)
        self.timers.set_timer(request.id, record.next_timer_at())
        self.wake_placement()
        return record

    def add_probe(self, request: Request, node: Incarnation, now: float) -> None:
        """Add an internal request that goes through `node`, which need not be in service, and
        through nodes of the other role that are. It is placed before all others, and once; its end
        is appended to `ended_probes`."""
        record = RequestRecord(
            request,
            now + request.timeout_seconds,
            Timestamps(now),
            is_internal=True,
            prompt_logprobs=(),
            probe_node=node,
        )
        record.identity_digest = self._registry.model_digest
        if not self.records:
            self.last_progress_at = now
        self.records[request.id] = record
        self.queue.add_request_front(request.id)
        self.timers.set_timer(request.id, record.next_timer_at())
        self.wake_placement()

    def find_attempt_of_sender(
        self, key: AttemptKey, sender: Incarnation
    ) -> tuple[RequestRecord, Attempt] | None:
        """Return the request and its current attempt if that is `key` and `sender` has a leg of it;
        otherwise count the message as stale and return None."""
        found = self.find_attempt(key)
        if found is None or sender not in found[1].legs:
            self.counters.dropped_messages["stale"] += 1
            return None
        return found

    def find_attempt(self, key: AttemptKey) -> tuple[RequestRecord, Attempt] | None:
        """Return the request and its current attempt if that is `key`."""
        record = self.records.get(key.request_id)
        attempt = record.attempt if record else None
        return (record, attempt) if record and attempt and attempt.key == key else None

    def node_name(self, node: Incarnation | None) -> NodeName:
        found = self._registry.nodes.get(node) if node else None
        return found.info.name if found else NodeName("")

    # while an attempt runs

    def on_reserved(self, record: RequestRecord, attempt: Attempt, now: float) -> None:
        record.set_state(RequestState.RESERVED)
        record.timestamps.mark_moment("reserved", now)
        attempt.trace.reserved = now
        attempt.reserve_deadline = None
        if record.attempt_count == 1:
            self.last_progress_at = now

    def send_ticket(self, attempt: Attempt, ticket: TicketOrder) -> None:
        attempt.transport = ticket.ticket.transport
        self.effects.send_order(ticket.ticket.writer_incarnation, ticket)

    def on_committed(self, record: RequestRecord, attempt: Attempt) -> None:
        """Decode runs the attempt and its cache has the prompt, so the hand-off is over. The
        prefill leg is closed, unless that node still owes the prompt's logprobs. Idempotent."""
        if not attempt.is_committed:
            attempt.is_committed = True
            if (
                attempt.node_pair is not None
                and attempt.transport
                and self.breakers.record_commit(attempt.node_pair, attempt.key)
            ):
                self.on_breaker_changed(attempt.node_pair)
            self.needs_placement |= self.followers.release_followers(
                record.request.id, attempt.decode
            )
        if attempt.prefill is not None and not record.awaits_prompt_logprobs:
            self.close_leg(attempt, attempt.prefill)

    def emit_tokens(
        self,
        record: RequestRecord,
        attempt: Attempt,
        tokens: list[int],
        scores: tuple[TokenLogprobs, ...],
        now: float,
    ) -> None:
        """Send the next output tokens to the client and charge the tenant for them."""
        if record.state is not RequestState.STREAMING:
            if not record.emitted_token_ids and record.prompt_logprobs is not None:
                if record.request.sampling.prompt_logprobs is not None:
                    self.effects.append_effect(
                        EmitPromptLogprobs(record.request.id, record.prompt_logprobs)
                    )
                record.prompt_logprobs = ()
            record.set_state(RequestState.STREAMING)
            record.timestamps.mark_moment("first_token", now)
            self.placement_state.record_first_token(
                attempt.trace.prediction, now - attempt.trace.placed
            )
            attempt.reserve_deadline = None
            record.prefill_charged_class = ""
        record.emitted_token_ids += tokens
        self.queue.charge_output(record.request.id, len(tokens), now)
        self.admission.charge_tokens(record.request.principal.tenant, len(tokens), now)
        self.counters.generated_tokens += 0 if record.is_internal else len(tokens)
        self.last_progress_at = now
        self.effects.append_effect(EmitTokens(record.request.id, tuple(tokens), scores))

    def close_leg(
        self, attempt: Attempt, node: Incarnation, cancel: BatonError | None = None
    ) -> None:
        """End the node's leg, with an order to cancel if `cancel` is given. Idempotent."""
        if node not in attempt.legs:
            return
        attempt.legs.remove(node)
        self.loads.remove_leg(node, attempt.key)
        self.wake_placement()
        if cancel is not None:
            self.effects.send_order(node, CancelOrder(attempt.key, cancel))

    def on_breaker_changed(self, pair: NodePair) -> None:
        """Count and log the new state of a pair's breaker."""
        state = self.breakers.get_state(pair)
        self.counters.breaker_changes[state.value] += 1
        self.wake_placement()
        self.effects.append_effect(
            BreakerChanged(self.node_name(pair[0]), self.node_name(pair[1]), state)
        )

    # the ways on and out

    def replace_attempt(
        self, record: RequestRecord, error: BatonError | None, now: float, *, exempt: bool = False
    ) -> None:
        """Give up the attempt and queue its request again, with the tokens that it has emitted.

        The request goes to the head of the queue, or backs off first if it failed before; the
        client sees nothing. `error` None is a refusal. Refusals, preemptions and drains wait for
        room and do not count as failures. Other errors do, and one that is not retryable ends the
        request. Failures are subject to the retry budget unless `exempt`. A probe has one attempt,
        because a second would hide a failure.
        """
        waits = error is None or isinstance(error, Preempted | NodeDrained)
        record.failure_count += not waits
        most = self._settings.max_attempts if record.probe_node is None else 0
        if error is not None and (not error.is_retryable or record.failure_count >= most):
            self.end_request(record, error, now)
            return
        exempt |= waits
        if error is not None and not exempt and not self.retries.has_room_for_retry(now):
            self.end_request(record, error, now)
            return
        attempt = record.attempt
        if attempt is not None:
            spared = error is None or isinstance(error, NodeDrained)
            record.avoided_nodes = (
                frozenset() if spared else record.nodes_to_avoid(attempt, self._registry.nodes)
            )
            self._abandon_attempt(record, attempt, error or Cancelled("the other node has no room"))
            attempt.trace.mark_ended(
                now, error.code if error else REFUSED, error.message if error else "no room there"
            )
            self.effects.append_effect(
                AttemptReplaced(attempt.key, error.message if error is not None else "refused")
            )
        record.prefix_holder = None
        record.replace_reason = error.code if error is not None else "refused"
        self.counters.replaced_attempts[record.replace_reason] += 1
        record.attempt = None
        record.set_state(RequestState.QUEUED)
        rest = 0.0 if waits else retry_backoff_seconds(record.failure_count)
        self.needs_placement |= self.retries.schedule_retry(record, rest, now, exempt=exempt)

    def end_request(
        self, record: RequestRecord, result: FinishReason | BatonError, now: float
    ) -> None:
        """End the request: the only place where a request ends."""
        request = record.request.id
        if record.attempt is not None:
            reason = (
                result if isinstance(result, BatonError) else Cancelled("the request has ended")
            )
            ended = result.code if isinstance(result, BatonError) else SERVED
            record.attempt.trace.mark_ended(
                now, ended, result.message if isinstance(result, BatonError) else ""
            )
            self._abandon_attempt(record, record.attempt, reason)
        del self.records[request]
        self.queue.remove_request(request)
        self.timers.cancel_timer(request)
        self.needs_placement |= self.followers.release_followers(request, None)
        self.unadmitted.discard(request)
        self.oversized.forget_request(request)
        self.retries.forget_request(request)
        if record.probe_node is not None:
            self.ended_probes.append((request, result))
        elif not record.attempt_count:
            self.admission.refund_request(
                record.request, now, accepted=record.admit_deadline is None
            )
        if isinstance(result, FinishReason):
            began = record.timestamps.first_token
            self.placement_state.record_answer(
                record.request,
                len(record.emitted_token_ids),
                now - began if began is not None else 0.0,
            )
        self.effects.append_effect(self.ended_requests.record_end(record, result, now))

    def on_node_lost(self, node: Incarnation, error: BatonError, now: float) -> None:
        """The node has left the registry: replace its attempts, oldest first, ignoring the retry
        budget. Retries held back after failures on that node are released too, since the loss
        explains them."""
        self.breakers.forget_node(node)
        self.needs_placement |= self.retries.on_node_lost(node, now)
        for key in reversed(self.loads.remove_node(node)):
            record = self.records.get(key.request_id)
            if record is not None and record.attempt is not None and record.attempt.key == key:
                record.attempt.legs.discard(node)
                self.replace_attempt(
                    record,
                    error if error.is_retryable else NodeLost(error.message),
                    now,
                    exempt=True,
                )

    def evacuate_node(self, node: Incarnation, error: BatonError, now: float) -> None:
        """Replace every attempt that has a leg on the node, oldest first."""
        for key in reversed(list(self.loads.attempts_on(node))):
            record = self.records.get(key.request_id)
            if record is not None and record.attempt is not None and record.attempt.key == key:
                self.replace_attempt(record, error, now)

    def on_request_timer(self, request: RequestId, now: float) -> None:
        """Handle whichever deadline of the request has passed."""
        record = self.records[request]
        attempt = record.attempt
        if now >= record.deadline:
            self.end_request(record, self.oversized.deadline_error(record), now)
        elif record.retry_at is not None and now >= record.retry_at:
            self.needs_placement |= self.retries.on_backoff_elapsed(record)
        elif record.admit_deadline is not None and now >= record.admit_deadline:
            why = self.why_not_serving() or self.context_capacity.why_too_long(record)
            waited = f"no node could serve the request for {ADMIT_TIMEOUT_SECONDS:g} s: {why}"
            self.end_request(
                record, ServiceUnavailable(waited, retry_after=ADMIT_TIMEOUT_SECONDS), now
            )
        elif (
            attempt is not None
            and attempt.reserve_deadline is not None
            and now >= attempt.reserve_deadline
        ):
            silent = self.node_name(attempt.decode)
            waited = f"{self._settings.reserve_timeout:g} s"
            self.replace_attempt(
                record,
                NodeStalled(f"node {silent} did not answer a request for {waited} (--stall)"),
                now,
            )
        if request in self.records:
            self.timers.set_timer(request, record.next_timer_at())

    def why_not_serving(self) -> str:
        """Return why the cluster cannot serve, or "" if it can. Decode nodes can serve alone: see
        `RequestPlacer`."""
        return self._registry.why_unavailable(Role.DECODE)

    def _abandon_attempt(self, record: RequestRecord, attempt: Attempt, reason: BatonError) -> None:
        attempt.prompt_logprobs.clear()
        attempt.buffered_tokens.clear()
        for node in sorted(attempt.legs):
            self.close_leg(attempt, node, reason)
        if attempt.node_pair is not None:
            self.needs_placement |= self.breakers.abandon_probe(attempt.node_pair, attempt.key)
        count_token_sources(record, attempt, self.counters, last=True)
