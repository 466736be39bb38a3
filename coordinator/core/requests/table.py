"""Every request that has not ended, and the ways on and out of an attempt.

Three rules hold for every input: a request ends only in `end_request`; a failed attempt goes on
only in `replace_attempt`; a leg is closed only in `close_leg`, or falls with its node in
`on_node_lost`.
"""

from collections.abc import Callable

from baton.cluster_link.messages import CancelOrder
from baton.errors import (
    BatonError,
    Cancelled,
    NodeDrained,
    NodeLost,
    NodeStalled,
    Preempted,
    ServiceUnavailable,
)
from baton.types import AttemptKey, FinishReason, Incarnation, Request, RequestId, Role
from coordinator.core.common.counters import Counters
from coordinator.core.common.effects import (
    AdmitRequest,
    AttemptReplaced,
    EffectLog,
    PlacementSignal,
    RequestTimers,
)
from coordinator.core.common.settings import BrainSettings, retry_backoff_seconds
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.placement.services import PlacementServices
from coordinator.core.requests.attempt_trace import REFUSED, SERVED
from coordinator.core.requests.explain import EndedRequests
from coordinator.core.requests.handoff_breakers import HandoffBreakers
from coordinator.core.requests.record import (
    Attempt,
    RequestRecord,
    RequestState,
    Timestamps,
    count_token_sources,
)
from coordinator.core.requests.waiting_requests import WaitingRequests

ADMIT_TIMEOUT_SECONDS = 1.0  # how long a new request waits for nodes that can serve it
RESTART_SECONDS = 5.0  # after which clients of a cluster that stops may try again

RequestEnd = FinishReason | BatonError
ProbeCallback = Callable[[RequestId, RequestEnd], None]


class ProgressClock:
    """When any request last made progress, or when the oldest of the present requests arrived."""

    def __init__(self) -> None:
        self.last_progress_at = 0.0

    def record_progress(self, now: float) -> None:
        self.last_progress_at = now


class RequestTable:
    """Owns the request records; every other part changes a request through it."""

    def __init__(
        self,
        registry: NodeRegistry,
        settings: BrainSettings,
        placement: PlacementServices,
        waiting: WaitingRequests,
        *,
        records: dict[RequestId, RequestRecord],
        timers: RequestTimers,
        counters: Counters,
        effects: EffectLog,
        signal: PlacementSignal,
        progress: ProgressClock,
        breakers: HandoffBreakers,
        ended_requests: EndedRequests,
    ) -> None:
        self.records = records
        self.unadmitted: dict[RequestId, RequestRecord] = {}  # no node can serve them yet
        self._registry = registry
        self._settings = settings
        self._placement = placement
        self._waiting = waiting
        self._timers = timers
        self._counters = counters
        self._effects = effects
        self._signal = signal
        self._progress = progress
        self._breakers = breakers
        self._ended_requests = ended_requests
        self._probe_callbacks: dict[RequestId, ProbeCallback] = {}

    # new requests

    def add_request(self, request: Request, now: float, *, internal: bool) -> RequestRecord:
        """Add a request that was admitted. A leader that has ended is ignored."""
        record = RequestRecord(
            request,
            now + request.timeout_seconds,
            Timestamps(now, request.grammar_seconds),
            internal,
            admit_deadline=now + ADMIT_TIMEOUT_SECONDS,
            identity_digest=self._registry.model_digest,
        )
        if len(request.prompt_token_ids) == 1:
            record.prompt_logprobs = ()
        self._waiting.retries.budget.record_request(now)
        self._waiting.queue.add_request(
            request.id, self._placement.admission.admit_request(request, now)
        )
        if not internal:
            self._placement.state.workload_meter.record_arrival(
                len(request.prompt_token_ids),
                self._placement.state.output_lengths.predict_tokens(
                    request.principal.tenant, request.sampling.max_tokens
                ),
                now,
            )
        leader = self.records.get(request.leader_id) if request.leader_id is not None else None
        if leader is not None:
            self._waiting.followers.add_follower(record, leader)
        self.unadmitted[request.id] = record
        self._add_record(record, now)
        return record

    def add_probe(
        self, request: Request, node: Incarnation, now: float, on_end: ProbeCallback
    ) -> None:
        """Add an internal request that goes through `node`, which need not be in service, and
        through nodes of the other role that are. It is placed before all others, and once; `on_end`
        is called when it ends."""
        record = RequestRecord(
            request,
            now + request.timeout_seconds,
            Timestamps(now),
            is_internal=True,
            prompt_logprobs=(),
            probe_node=node,
            identity_digest=self._registry.model_digest,
        )
        self._probe_callbacks[request.id] = on_end
        self._waiting.queue.add_request_front(request.id)
        self._add_record(record, now)

    def admit_request(self, record: RequestRecord) -> None:
        """Accept a request that a node can serve: it no longer ends for want of a node."""
        request = record.request.id
        del self.unadmitted[request]
        record.admit_deadline = None
        self._timers.set_timer(request, record.next_timer_at())
        self._effects.append_effect(AdmitRequest(request))

    # while an attempt runs

    def find_attempt_of_sender(
        self, key: AttemptKey, sender: Incarnation
    ) -> tuple[RequestRecord, Attempt] | None:
        """Return the request and its current attempt if that is `key` and `sender` has a leg of it;
        otherwise count the message as stale and return None."""
        found = self.find_attempt(key)
        if found is None or sender not in found[1].legs:
            self._counters.dropped_messages["stale"] += 1
            return None
        return found

    def find_attempt(self, key: AttemptKey) -> tuple[RequestRecord, Attempt] | None:
        """Return the request and its current attempt if that is `key`."""
        record = self.records.get(key.request_id)
        attempt = record.attempt if record else None
        return (record, attempt) if record and attempt and attempt.key == key else None

    def commit_attempt(self, record: RequestRecord, attempt: Attempt) -> None:
        """Decode runs the attempt and its cache has the prompt, so the hand-off is over. The
        prefill leg is closed, unless that node still owes the prompt's logprobs. Idempotent."""
        if not attempt.is_committed:
            attempt.is_committed = True
            self._breakers.record_commit(attempt)
            if self._waiting.followers.release_followers(record.request.id, attempt.decode):
                self._signal.request_pass()
        if attempt.prefill is not None and not record.awaits_prompt_logprobs:
            self.close_leg(attempt, attempt.prefill)

    def close_leg(
        self, attempt: Attempt, node: Incarnation, cancel: BatonError | None = None
    ) -> None:
        """End the node's leg, with an order to cancel if `cancel` is given. Idempotent."""
        if node not in attempt.legs:
            return
        attempt.legs.remove(node)
        self._placement.loads.remove_leg(node, attempt.key)
        self._signal.request_pass()
        if cancel is not None:
            self._effects.send_order(node, CancelOrder(attempt.key, cancel))

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
        max_attempts = self._settings.max_attempts if record.probe_node is None else 0
        if error is not None and (not error.is_retryable or record.failure_count >= max_attempts):
            self.end_request(record, error, now)
            return
        exempt |= waits
        if error is not None and not exempt and not self._waiting.retries.has_room_for_retry(now):
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
            self._effects.append_effect(
                AttemptReplaced(attempt.key, error.message if error is not None else "refused")
            )
        record.prefix_holder = None
        record.replace_reason = error.code if error is not None else "refused"
        self._counters.replaced_attempts[record.replace_reason] += 1
        record.attempt = None
        record.set_state(RequestState.QUEUED)
        backoff = 0.0 if waits else retry_backoff_seconds(record.failure_count)
        if self._waiting.retries.schedule_retry(record, backoff, now, exempt=exempt):
            self._signal.request_pass()

    def end_request(self, record: RequestRecord, result: RequestEnd, now: float) -> None:
        """End the request: the only place where a request ends."""
        request = record.request.id
        error = result if isinstance(result, BatonError) else None
        if record.attempt is not None:
            record.attempt.trace.mark_ended(
                now, error.code if error else SERVED, error.message if error else ""
            )
            self._abandon_attempt(
                record, record.attempt, error or Cancelled("the request has ended")
            )
        del self.records[request]
        self._timers.cancel_timer(request)
        self.unadmitted.pop(request, None)
        if self._waiting.forget_request(request):
            self._signal.request_pass()
        if record.probe_node is not None:
            self._probe_callbacks.pop(request)(request, result)
        elif not record.attempt_count:
            self._placement.admission.refund_request(
                record.request, now, accepted=record.admit_deadline is None
            )
        if error is None:
            started = record.timestamps.first_token
            self._placement.state.record_answer(
                record.request,
                len(record.emitted_token_ids),
                now - started if started is not None else 0.0,
            )
        self._effects.append_effect(self._ended_requests.record_end(record, result, now))

    def on_node_lost(self, node: Incarnation, error: BatonError, now: float) -> None:
        """The node has left the registry: replace its attempts, oldest first, ignoring the retry
        budget. Retries held back after failures on that node are released too, since the loss
        explains them."""
        self._placement.breakers.forget_node(node)
        if self._waiting.retries.on_node_lost(node, now):
            self._signal.request_pass()
        for key in reversed(self._placement.loads.remove_node(node)):
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
        for key in reversed(list(self._placement.loads.attempts_on(node))):
            record = self.records.get(key.request_id)
            if record is not None and record.attempt is not None and record.attempt.key == key:
                self.replace_attempt(record, error, now)

    def on_request_timer(self, request: RequestId, now: float) -> None:
        """Handle the deadline that has passed: request, backoff, admission or reservation."""
        record = self.records[request]
        attempt = record.attempt
        if now >= record.deadline:
            self.end_request(record, self._waiting.oversized.deadline_error(record), now)
        elif record.retry_at is not None and now >= record.retry_at:
            self._waiting.retries.on_backoff_elapsed(record)
            self._signal.request_pass()
        elif record.admit_deadline is not None and now >= record.admit_deadline:
            why = self._registry.why_unavailable(
                Role.DECODE
            ) or self._placement.capacity.why_too_long(record)
            waited = f"no node could serve the request for {ADMIT_TIMEOUT_SECONDS:g} s: {why}"
            self.end_request(
                record, ServiceUnavailable(waited, retry_after=ADMIT_TIMEOUT_SECONDS), now
            )
        elif (
            attempt is not None
            and attempt.reserve_deadline is not None
            and now >= attempt.reserve_deadline
        ):
            silent = self._registry.name_of(attempt.decode)
            waited = f"{self._settings.reserve_timeout:g} s"
            self.replace_attempt(
                record,
                NodeStalled(f"node {silent} did not answer a request for {waited} (--stall)"),
                now,
            )
        if request in self.records:
            self._timers.set_timer(request, record.next_timer_at())

    def _add_record(self, record: RequestRecord, now: float) -> None:
        if not self.records:
            self._progress.record_progress(now)
        self.records[record.request.id] = record
        self._timers.set_timer(record.request.id, record.next_timer_at())
        self._signal.request_pass()

    def _abandon_attempt(self, record: RequestRecord, attempt: Attempt, reason: BatonError) -> None:
        attempt.prompt_logprobs.clear()
        attempt.buffered_tokens.clear()
        for node in sorted(attempt.legs):
            self.close_leg(attempt, node, reason)
        self._breakers.abandon_probe(attempt)
        count_token_sources(record, attempt, self._counters, last=True)
