"""Applies each node report to the requests.

Reports of another attempt, or of a node that has no leg of it any more, are dropped and counted, so
late, repeated and reordered reports change nothing.
"""

from collections.abc import Callable
from typing import Any

from baton.cluster_link.messages import (
    AttemptFailed,
    BlocksReserved,
    CacheEvents,
    CacheSnapshot,
    CacheSnapshotRequest,
    DecodeStarted,
    HandoffCompleted,
    Heartbeat,
    NodeLeaving,
    NodeReport,
    PrefillEnded,
    PromptLogprobsReport,
    ReservationRefused,
    StepTokens,
    TicketOrder,
)
from baton.cluster_link.report_types import HandoffReport
from baton.errors import Cancelled, HandoffFailed, NodeFailed, Preempted, StaleMessage
from baton.types import Incarnation
from coordinator.core.common.counters import Counters
from coordinator.core.common.effects import EffectLog, PlacementSignal
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.placement.services import PlacementServices
from coordinator.core.requests.explain import EndedRequests
from coordinator.core.requests.handoff_breakers import HandoffBreakers
from coordinator.core.requests.record import (
    Attempt,
    RequestRecord,
    RequestState,
    count_token_sources,
)
from coordinator.core.requests.table import ProgressClock, RequestTable
from coordinator.core.requests.token_reports import TokenReportHandler


class NodeReportHandler:
    """Applies reports of nodes, with one method for each kind of report."""

    def __init__(
        self,
        registry: NodeRegistry,
        table: RequestTable,
        placement: PlacementServices,
        token_handler: TokenReportHandler,
        *,
        counters: Counters,
        effects: EffectLog,
        signal: PlacementSignal,
        progress: ProgressClock,
        breakers: HandoffBreakers,
        ended_requests: EndedRequests,
    ) -> None:
        self._registry = registry
        self._table = table
        self._placement = placement
        self._token_handler = token_handler
        self._counters = counters
        self._effects = effects
        self._signal = signal
        self._progress = progress
        self._breakers = breakers
        self._ended_requests = ended_requests
        self._handlers: dict[type, Callable[[Incarnation, Any, float], None]] = {
            BlocksReserved: self._on_blocks_reserved,
            ReservationRefused: self._on_reservation_refused,
            PromptLogprobsReport: token_handler.on_prompt_logprobs,
            StepTokens: token_handler.on_step_tokens,
            AttemptFailed: self._on_attempt_failed,
            PrefillEnded: self._on_prefill_ended,
            HandoffCompleted: self._on_handoff_completed,
            DecodeStarted: self._on_decode_started,
            Heartbeat: self._on_heartbeat,
            CacheEvents: self._on_cache_events,
            CacheSnapshot: self._on_cache_snapshot,
            NodeLeaving: self._on_node_leaving,
        }

    def handle_message(self, sender: Incarnation, message: NodeReport, now: float) -> None:
        """Apply a report of `sender`, which must be a member."""
        self._handlers[type(message)](sender, message, now)

    def _on_blocks_reserved(self, sender: Incarnation, message: BlocksReserved, now: float) -> None:
        found = self._table.find_attempt_of_sender(message.key, sender)
        if found is None:
            return
        record, attempt = found
        if record.state is not RequestState.PLACED or sender != attempt.decode:
            self._count_unexpected()
            return
        self._placement.loads.acknowledge_leg(sender, message.key)
        self._mark_reserved(record, attempt, now)
        ticket = message.ticket
        if ticket is None:
            if attempt.prefill is not None and record.awaits_prompt_logprobs:
                who = self._registry.name_of(sender)
                self._table.replace_attempt(
                    record,
                    StaleMessage(
                        f"node {who} left no prompt to compute, but its logprobs were requested"
                    ),
                    now,
                )
            elif attempt.prefill is not None:
                attempt.trace.mark_handoff_skipped()
                record.timestamps.mark_handoff_skipped()
                self._table.close_leg(
                    attempt, attempt.prefill, Cancelled("decode holds the prompt already")
                )
        elif (
            ticket.key != attempt.key
            or ticket.writer_incarnation != attempt.prefill
            or ticket.decode_peer.incarnation != sender
        ):
            self._table.replace_attempt(
                record, StaleMessage(f"ticket {ticket.id} is for another attempt or node"), now
            )
        else:
            attempt.transport = ticket.transport
            self._effects.send_order(ticket.writer_incarnation, TicketOrder(ticket))

    def _mark_reserved(self, record: RequestRecord, attempt: Attempt, now: float) -> None:
        record.set_state(RequestState.RESERVED)
        record.timestamps.mark_moment("reserved", now)
        attempt.trace.reserved = now
        attempt.reserve_deadline = None
        if record.attempt_count == 1:
            self._progress.record_progress(now)

    def _on_reservation_refused(
        self, sender: Incarnation, message: ReservationRefused, now: float
    ) -> None:
        found = self._table.find_attempt_of_sender(message.key, sender)
        if found is None:
            return
        record, attempt = found
        attempt.trace.needed_blocks, attempt.trace.free_blocks = (
            message.needed_blocks,
            message.free_blocks,
        )
        self._table.close_leg(attempt, sender)
        self._placement.loads.close_node(
            sender,
            self._placement.placer.make_demand(record).blocks,
            needed=message.needed_blocks,
            free_blocks=message.free_blocks,
        )
        self._table.replace_attempt(record, None, now)

    def _on_attempt_failed(self, sender: Incarnation, message: AttemptFailed, now: float) -> None:
        found = self._table.find_attempt_of_sender(message.key, sender)
        if found is None:
            return
        record, attempt = found
        if isinstance(message.error, HandoffFailed):
            self._counters.handoffs[message.error.code, attempt.transport or "none"] += 1
            self._breakers.record_failure(attempt, message.error, now)
        self._table.close_leg(attempt, sender)
        if isinstance(message.error, Preempted):
            blocks = self._placement.placer.make_demand(record).blocks
            self._placement.loads.close_node(sender, blocks, needed=blocks)
        record.prefill_charged_class = message.preempting_class
        error = message.error
        if isinstance(error, Cancelled):  # only clients cancel, and they tell us
            error = NodeFailed(
                f"node {self._registry.name_of(sender)} gave the request up: {error.message}"
            )
        self._table.replace_attempt(record, error, now)

    def _on_prefill_ended(self, sender: Incarnation, message: PrefillEnded, now: float) -> None:
        """Accepted as long as the attempt is current: decode's report may arrive first and close
        the prefill leg."""
        found = self._table.find_attempt(message.key)
        if found is None or sender not in (found[1].prefill, found[1].decode):
            self._counters.dropped_messages["stale"] += 1
            return
        record, attempt = found
        if sender != attempt.prefill or attempt.prefill_report is not None:
            self._count_unexpected()
            return
        attempt.prefill_report = message
        if not attempt.trace.is_handoff_skipped:
            attempt.trace.prefill_ended = now
            record.timestamps.mark_moment("prefill_ended", now)
        self._placement.loads.acknowledge_leg(sender, message.key, computed=True, now=now)
        self._placement.state.record_prefill(sender, message, now)
        count_token_sources(record, attempt, self._counters)
        self._signal.request_pass()
        self._progress.record_progress(now)
        if record.awaits_prompt_logprobs:
            self._table.replace_attempt(
                record, self._token_handler.missing_logprobs_error(record, attempt), now
            )

    def _on_handoff_completed(
        self, sender: Incarnation, message: HandoffCompleted, now: float
    ) -> None:
        """Accepted at any time: decode's report often arrives first, and a short answer may have
        ended."""
        key, report = message.key, message.report
        found = self._table.find_attempt(key)
        if found is not None and found[1].prefill == sender:
            is_first = not found[1].is_handed_off
            self._mark_handed_off(*found, sender, report, now)
        else:
            is_first = (
                key.request_id not in self._table.records
                and self._ended_requests.timelines.add_handoff_report(key, report)
            )
            if is_first:
                self._ended_requests.explanations.add_handoff_report(key, report)
        if is_first:
            self._counters.handoffs["committed", report.transport] += 1
            self._counters.handoff_bytes[report.transport] += report.bytes
        else:
            self._counters.dropped_messages["stale"] += 1

    def _mark_handed_off(
        self,
        record: RequestRecord,
        attempt: Attempt,
        writer: Incarnation,
        report: HandoffReport,
        now: float,
    ) -> None:
        if not attempt.is_handed_off:
            self._placement.state.record_handoff(writer, attempt.decode, report, now)
        attempt.is_handed_off = True
        record.timestamps.mark_moment("committed", now)
        record.timestamps.handoff_report = attempt.trace.handoff_report = report
        attempt.trace.mark_committed(now)
        if writer in attempt.legs:
            self._table.close_leg(attempt, writer)
            if record.awaits_prompt_logprobs:
                error = self._token_handler.missing_logprobs_error(record, attempt)
                self._table.replace_attempt(record, error, now)
            else:
                self._table.commit_attempt(record, attempt)
        self._progress.record_progress(now)

    def _on_decode_started(self, sender: Incarnation, message: DecodeStarted, now: float) -> None:
        found = self._table.find_attempt_of_sender(message.key, sender)
        if found is None:
            return
        record, attempt = found
        if sender != attempt.decode or attempt.decode_report is not None:
            self._count_unexpected()
            return
        attempt.decode_report = message
        attempt.trace.mark_committed(now)
        record.timestamps.mark_moment("committed", now)
        self._placement.loads.acknowledge_leg(sender, message.key)
        self._placement.state.record_prefill(sender, message, now)
        self._table.commit_attempt(record, attempt)
        count_token_sources(record, attempt, self._counters)
        self._progress.record_progress(now)

    def _on_heartbeat(self, sender: Incarnation, message: Heartbeat, now: float) -> None:
        node = self._registry.nodes[sender]
        if node.stats is not None and message.stats.queued_tokens < node.stats.queued_tokens:
            self._progress.record_progress(now)
        self._placement.state.record_decode_steps(node, node.stats, message.stats, now)
        if self._registry.record_heartbeat(node, message.stats):
            self._placement.capacity.on_cache_shrunk()
        self._placement.loads.update_free_blocks(
            sender, message.stats.blocks_free + message.stats.blocks_cached
        )
        self._signal.request_pass()

    def _on_cache_events(self, sender: Incarnation, message: CacheEvents, now: float) -> None:
        directory = self._placement.state.prefix_directory
        if directory.apply_events(sender, message.sequence, message.inserted, message.evicted, now):
            self._effects.send_order(sender, CacheSnapshotRequest())

    def _on_cache_snapshot(self, sender: Incarnation, message: CacheSnapshot, now: float) -> None:
        directory = self._placement.state.prefix_directory
        directory.apply_snapshot(sender, message.sequence, message.block_hashes)

    def _on_node_leaving(self, sender: Incarnation, message: NodeLeaving, now: float) -> None:
        self._registry.nodes[sender].is_leaving = True
        self._signal.request_pass()

    def _count_unexpected(self) -> None:
        self._counters.dropped_messages["unexpected"] += 1
