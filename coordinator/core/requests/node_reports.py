"""Applies each node report to the requests.

Reports of another attempt, or of a node that has no leg of it any more, are dropped and counted, so
late, repeated and reordered reports change nothing.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
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
from baton.errors import BatonError, Cancelled, HandoffFailed, NodeFailed, Preempted, StaleMessage
from baton.types import FinishReason, Incarnation, TokenEvent, TokenLogprobs
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.requests import logprob_checks as scores
from coordinator.core.requests.record import (
    Attempt,
    RequestRecord,
    RequestState,
    count_token_sources,
)
from coordinator.core.requests.table import RequestTable

_key_of = attrgetter("key")


class NodeReportHandler:
    def __init__(self, registry: NodeRegistry, table: RequestTable) -> None:
        self._registry = registry
        self._table = table
        self._handlers: dict[type, Callable[[Incarnation, Any, float], None]] = {
            BlocksReserved: self._on_blocks_reserved,
            ReservationRefused: self._on_reservation_refused,
            PromptLogprobsReport: self._on_prompt_logprobs,
            StepTokens: self._on_tokens,
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
        self._table.loads.acknowledge_leg(sender, message.key)
        self._table.on_reserved(record, attempt, now)
        ticket = message.ticket
        if ticket is None:
            if attempt.prefill is not None and record.awaits_prompt_logprobs:
                who = self._table.node_name(sender)
                self._table.replace_attempt(
                    record,
                    StaleMessage(f"node {who} left no prompt to compute, whose scores are asked"),
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
            self._table.send_ticket(attempt, TicketOrder(ticket))

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
        self._table.loads.close_node(
            sender,
            self._table.placer.make_demand(record).blocks,
            needed=message.needed_blocks,
            free_blocks=message.free_blocks,
        )
        self._table.replace_attempt(record, None, now)

    def _on_tokens(self, sender: Incarnation, message: StepTokens, now: float) -> None:
        for key, events in groupby(message.events, key=_key_of):
            found = self._table.find_attempt_of_sender(key, sender)
            if found is not None:
                self._accept_tokens(*found, sender, list(events), now)

    def _accept_tokens(
        self,
        record: RequestRecord,
        attempt: Attempt,
        sender: Incarnation,
        events: Sequence[TokenEvent],
        now: float,
    ) -> None:
        """Emit one sequence's tokens of a report, as far as they continue the output exactly."""
        if record.awaits_prompt_logprobs:
            self._buffer_tokens(record, attempt, sender, events, now)
            return
        fresh: list[int] = []
        fresh_scores: list[TokenLogprobs] = []
        width = scores.required_top_logprobs(record.request.sampling.logprobs, self._vocab_size)
        finish: FinishReason | None = None
        error: BatonError | None = None
        for event in events:
            expected = len(record.emitted_token_ids) + len(fresh)
            if finish is not None or event.output_index != expected:
                error = StaleMessage(
                    f"node {self._table.node_name(sender)} sent token {event.output_index},"
                    f" expected was {expected}"
                )
                break
            if sender == attempt.prefill and event.finish_reason is None:
                error = StaleMessage(
                    f"prefill node {self._table.node_name(sender)} sent a token that ends nothing"
                )
                break
            if width is not None:
                if event.logprobs is None or not scores.has_required_logprobs(
                    event.logprobs, width
                ):
                    error = StaleMessage(
                        f"node {self._table.node_name(sender)} sent token {event.output_index}"
                        " without the score asked"
                    )
                    break
                fresh_scores.append(event.logprobs)
            fresh.append(event.token_id)
            finish = event.finish_reason
            if finish is None and expected + 1 >= record.request.sampling.max_tokens:
                finish = FinishReason.LENGTH
        if fresh:
            if record.state is not RequestState.STREAMING:
                self._table.loads.acknowledge_leg(sender, attempt.key, computed=True, now=now)
                self._table.wake_placement()
            if sender == attempt.decode and not attempt.is_committed:
                self._table.on_committed(record, attempt)
            self._table.emit_tokens(record, attempt, fresh, tuple(fresh_scores), now)
        if finish is not None:
            self._table.close_leg(attempt, sender)
            self._table.end_request(record, finish, now)
        elif error is not None:
            self._table.replace_attempt(record, error, now)

    def _on_prompt_logprobs(
        self, sender: Incarnation, message: PromptLogprobsReport, now: float
    ) -> None:
        found = self._table.find_attempt_of_sender(message.key, sender)
        if found is None:
            return
        record, attempt = found
        if sender != attempt.computing_node or not record.awaits_prompt_logprobs:
            self._count_unexpected()
            return
        try:
            scores.collect_prompt_logprobs(record, attempt, message, self._vocab_size)
        except StaleMessage as error:
            self._table.replace_attempt(record, error, now)
            return
        self._table.loads.acknowledge_leg(sender, message.key)
        self._table.last_progress_at = now
        if attempt.is_committed:
            self._table.on_committed(record, attempt)
        if (
            attempt.buffered_tokens
            and attempt.decode is not None
            and not record.awaits_prompt_logprobs
        ):
            held, attempt.buffered_tokens = attempt.buffered_tokens, []
            self._accept_tokens(record, attempt, attempt.decode, held, now)

    def _buffer_tokens(
        self,
        record: RequestRecord,
        attempt: Attempt,
        sender: Incarnation,
        events: Sequence[TokenEvent],
        now: float,
    ) -> None:
        """Keep decode's tokens until prefill has sent the logprobs of the whole prompt."""
        attempt.buffered_tokens += events
        if (
            sender == attempt.computing_node
            or len(attempt.buffered_tokens) > record.remaining_tokens
        ):
            self._table.replace_attempt(record, self._missing_logprobs_error(record, attempt), now)
            return
        self._table.loads.acknowledge_leg(sender, attempt.key, computed=True, now=now)
        self._table.on_committed(record, attempt)
        self._table.last_progress_at = now

    def _missing_logprobs_error(self, record: RequestRecord, attempt: Attempt) -> StaleMessage:
        name = self._table.node_name(attempt.computing_node)
        come, all_of_them = len(attempt.prompt_logprobs), len(record.request.prompt_token_ids) - 1
        return StaleMessage(
            f"node {name} has computed the prompt and sent {come} of its {all_of_them} scores"
        )

    def _on_attempt_failed(self, sender: Incarnation, message: AttemptFailed, now: float) -> None:
        found = self._table.find_attempt_of_sender(message.key, sender)
        if found is None:
            return
        record, attempt = found
        if isinstance(message.error, HandoffFailed):
            self._table.counters.handoffs[message.error.code, attempt.transport or "none"] += 1
            self._report_to_breaker(attempt, message.error, now)
        self._table.close_leg(attempt, sender)
        if isinstance(message.error, Preempted):
            blocks = self._table.placer.make_demand(record).blocks
            self._table.loads.close_node(sender, blocks, needed=blocks)
        record.prefill_charged_class = message.preempting_class
        error = message.error
        if isinstance(error, Cancelled):  # only clients cancel, and they tell us
            error = NodeFailed(
                f"node {self._table.node_name(sender)} gave the request up: {error.message}"
            )
        self._table.replace_attempt(record, error, now)

    def _report_to_breaker(self, attempt: Attempt, error: HandoffFailed, now: float) -> None:
        """Count a failed hand-off against its pair of nodes, unless it is only stale: that says
        nothing about their link."""
        pair = attempt.node_pair
        if (
            pair is not None
            and not isinstance(error, StaleMessage)
            and self._table.breakers.record_failure(pair, attempt.key, now)
        ):
            self._table.on_breaker_changed(pair)

    def _on_prefill_ended(self, sender: Incarnation, message: PrefillEnded, now: float) -> None:
        """Accepted as long as the attempt is current: decode's report may arrive first and close
        the prefill leg."""
        found = self._table.find_attempt(message.key)
        if found is None or sender not in (found[1].prefill, found[1].decode):
            self._table.counters.dropped_messages["stale"] += 1
            return
        record, attempt = found
        if sender != attempt.prefill or attempt.prefill_report is not None:
            self._count_unexpected()
            return
        attempt.prefill_report = message
        if not attempt.trace.is_handoff_skipped:
            attempt.trace.prefill_ended = now
            record.timestamps.mark_moment("prefill_ended", now)
        self._table.loads.acknowledge_leg(sender, message.key, computed=True, now=now)
        self._table.placement_state.record_prefill(sender, message, now)
        count_token_sources(record, attempt, self._table.counters)
        self._table.wake_placement()
        self._table.last_progress_at = now
        if record.awaits_prompt_logprobs:
            self._table.replace_attempt(record, self._missing_logprobs_error(record, attempt), now)

    def _on_handoff_completed(
        self, sender: Incarnation, message: HandoffCompleted, now: float
    ) -> None:
        """Accepted at any time: decode's report often arrives first, and a short answer may have
        ended."""
        key, report, table = message.key, message.report, self._table
        found = table.find_attempt(key)
        if found is not None and found[1].prefill == sender:
            record, attempt = found
            news = not attempt.is_handed_off
            if news:
                table.placement_state.record_handoff(sender, attempt.decode, report, now)
            attempt.is_handed_off = True
            record.timestamps.mark_moment("committed", now)
            record.timestamps.handoff_report = attempt.trace.handoff_report = report
            attempt.trace.mark_committed(now)
            if sender in attempt.legs:
                table.close_leg(attempt, sender)
                if record.awaits_prompt_logprobs:
                    table.replace_attempt(
                        record, self._missing_logprobs_error(record, attempt), now
                    )
                else:
                    table.on_committed(record, attempt)
            table.last_progress_at = now
        else:
            news = (
                key.request_id not in table.records
                and table.ended_requests.timelines.add_handoff_report(key, report)
            )
            if news:
                table.ended_requests.explanations.add_handoff_report(key, report)
        if news:
            table.counters.handoffs["committed", report.transport] += 1
            table.counters.handoff_bytes[report.transport] += report.bytes
        else:
            table.counters.dropped_messages["stale"] += 1

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
        self._table.loads.acknowledge_leg(sender, message.key)
        self._table.placement_state.record_prefill(sender, message, now)
        self._table.on_committed(record, attempt)
        count_token_sources(record, attempt, self._table.counters)
        self._table.last_progress_at = now

    def _on_heartbeat(self, sender: Incarnation, message: Heartbeat, now: float) -> None:
        node = self._registry.nodes[sender]
        if node.stats is not None and message.stats.queued_tokens < node.stats.queued_tokens:
            self._table.last_progress_at = now
        self._table.placement_state.record_decode_steps(node, node.stats, message.stats, now)
        self._registry.record_heartbeat(node, message.stats)
        self._table.loads.update_free_blocks(
            sender, message.stats.blocks_free + message.stats.blocks_cached
        )
        self._table.wake_placement()

    def _on_cache_events(self, sender: Incarnation, message: CacheEvents, now: float) -> None:
        directory = self._table.placement_state.prefix_directory
        if directory.apply_events(sender, message.sequence, message.inserted, message.evicted, now):
            self._table.effects.send_order(sender, CacheSnapshotRequest())

    def _on_cache_snapshot(self, sender: Incarnation, message: CacheSnapshot, now: float) -> None:
        directory = self._table.placement_state.prefix_directory
        directory.apply_snapshot(sender, message.sequence, message.block_hashes)

    def _on_node_leaving(self, sender: Incarnation, message: NodeLeaving, now: float) -> None:
        self._registry.nodes[sender].is_leaving = True
        self._table.wake_placement()

    @property
    def _vocab_size(self) -> int:
        model = self._registry.model_identity
        return model.vocab_size if model is not None else 0

    def _count_unexpected(self) -> None:
        self._table.counters.dropped_messages["unexpected"] += 1
