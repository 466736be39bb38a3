"""Places waiting requests whenever something has changed for them, in the order of the queue."""

from baton.cluster_link.messages import DecodeOrder, PrefillOrder
from baton.types import AttemptKey
from coordinator.core.common.effects import AdmitRequest
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.placement.interface import PlacementDecision
from coordinator.core.requests.attempt_trace import start_trace
from coordinator.core.requests.record import Attempt, RequestRecord, RequestState
from coordinator.core.requests.table import RequestTable


class PlacementLoop:
    """Admits and places waiting requests when the table has been woken."""

    def __init__(self, registry: NodeRegistry, table: RequestTable, reserve_timeout: float) -> None:
        """`reserve_timeout`: seconds in which a decode node must answer an order with a writer."""
        self._registry = registry
        self._table = table
        self._reserve_timeout = reserve_timeout

    def place_waiting_requests(self, now: float) -> None:
        """Admit and place whatever can be, if anything has changed since the last call."""
        self._table.needs_placement |= self._table.retries.release_within_budget(now)
        if not self._table.needs_placement:
            return
        self._table.needs_placement = False
        self._table.oversized.release_fitting()
        if self._table.unadmitted and not self._table.why_not_serving():
            self._admit_waiting()
        while self._table.queue and self._place_next(now):
            pass

    def _admit_waiting(self) -> None:
        for record in [
            record
            for request, record in self._table.records.items()
            if request in self._table.unadmitted
        ]:
            if not self._table.context_capacity.why_too_long(record):
                self._admit_request(record)

    def _admit_request(self, record: RequestRecord) -> None:
        request = record.request.id
        self._table.unadmitted.remove(request)
        record.admit_deadline = None
        self._table.timers.set_timer(request, record.next_timer_at())
        self._table.effects.append_effect(AdmitRequest(request))

    def _place_next(self, now: float) -> bool:
        """Place or end the first candidate that allows it; return whether one was found."""
        views = self._table.placer.list_node_views(now)
        full, passed_over = (
            self._table.latency_estimator.is_decode_full(),
            set[tuple[int, str]](),
        )  # by class and tenant
        smallest = min((view.max_context_tokens for view in views), default=0)
        for request in self._table.queue.list_candidates() if self._registry.nodes else ():
            record = self._table.records[request]
            if (
                late := self._table.placer.find_deadline_error(
                    record, now, wanted=len(self._table.queue) > 1
                )
            ) is not None:
                self._table.end_request(record, late, now)
                return True
            if (
                record.max_total_tokens > smallest
                and record.probe_node is None
                and self._table.context_capacity.why_too_long(record)
            ):
                if (error := self._table.oversized.hold_request(record)) is not None:
                    self._table.end_request(record, error, now)
                return True
            if full and record.remaining_tokens > 1 and record.probe_node is None:
                continue  # as it is most of the time under load
            standing, headroom = (
                record.request.principal,
                self._table.admission.headroom_share(request, now),
            )
            flow = standing.priority_level, standing.tenant
            if headroom and flow in passed_over:
                continue  # its next would not be placed either
            decision = self._table.placer.decide_placement(record, views, now, headroom)
            if decision is not None:
                yielding = [
                    tenant for level, tenant in passed_over if level == standing.priority_level
                ]
                self._table.queue.take_request(request, now, yielding)
                self._start_attempt(record, decision, now)
                return True
            if headroom:
                passed_over.add(flow)
        return False

    def _start_attempt(
        self, record: RequestRecord, decision: PlacementDecision, now: float
    ) -> None:
        if (
            record.request.id in self._table.unadmitted
        ):  # one token alone: prefill can serve it while there is no decode node
            self._admit_request(record)
        record.attempt_count += 1
        request, prefill, decode = record.request, decision.choice.prefill, decision.choice.decode
        key = AttemptKey(request.id, record.attempt_count, request.choice_index)
        attempt = Attempt(key, prefill, decode, start_trace(decision, self._table.node_name, now))
        record.begin_attempt(attempt)
        attempt.legs.update(filter(None, (decode, prefill)))
        self._table.placer.book_legs(record, key, decision, now)
        self._table.counters.placements[decision.prefill_site.value, decision.reason.value] += 1
        record.set_state(RequestState.PLACED)
        models = [
            self._registry.nodes[node].model_digest.hex()
            for node in (prefill, decode)
            if node is not None
        ]
        record.timestamps.mark_placed(
            now, self._table.node_name(prefill), self._table.node_name(decode), models
        )
        work = record.make_attempt_spec(key, now)
        elsewhere = self._table.placer.find_remote_prefixes(record, decision)
        if decode is not None:
            writer = self._registry.nodes[prefill].address if prefill is not None else None
            share = self._table.placer.get_local_prefill_share(decision.demand)
            self._table.effects.send_order(
                decode, DecodeOrder(work, writer, share, elsewhere.get(decode))
            )
        if prefill is not None:
            self._table.effects.send_order(
                prefill,
                PrefillOrder(
                    work, needs_no_decode=decode is None, remote_prefix=elsewhere.get(prefill)
                ),
            )
            if decode is not None:
                attempt.reserve_deadline = now + self._reserve_timeout
                self._table.timers.set_timer(request.id, record.next_timer_at())
        if record.prefix_holder is not None and decode not in (None, record.prefix_holder):
            self._table.followers.reassign_followers(record)
        attempt.trace.held_back_seconds, record.held_back_seconds = record.held_back_seconds, 0.0
        pair = attempt.node_pair
        attempt.trace.is_breaker_probe = pair is not None and self._table.breakers.try_start_probe(
            pair, key
        )
        if record.attempt_count == 1:
            self._table.last_progress_at = now
