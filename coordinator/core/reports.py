"""What each message of a node does to the requests. Messages of another attempt, or of a node that has no part in it
any more, are dropped and counted: late, repeated and reordered ones change nothing."""

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from baton.errors import BatonError, Cancelled, HandoffFailed, NodeFailed, Preempted, Stale
from baton.types import FinishReason, Incarnation, TokenEvent, TokenScore
from coordinator.core import messages as m
from coordinator.core import scores
from coordinator.core.counting import count_sources
from coordinator.core.record import Attempt, Record, RequestState
from coordinator.core.registry import Registry
from coordinator.core.requests import RequestTable

_key_of = attrgetter("key")


class Reports:
    def __init__(self, registry: Registry, table: RequestTable) -> None:
        self._registry = registry
        self._table = table
        self._handlers: dict[type, Callable[[Incarnation, Any, float], None]] = {
            m.Reserved: self._reserved,
            m.Refused: self._refused,
            m.PromptScores: self._prompt_scores,
            m.Tokens: self._tokens,
            m.AttemptFailed: self._failed,
            m.PrefillEnded: self._prefill_ended,
            m.HandedOff: self._handed_off,
            m.Admitted: self._admitted,
            m.Heartbeat: self._heartbeat,
            m.CacheEvents: self._cache_events,
            m.CacheSnapshot: self._cache_snapshot,
            m.Leaving: self._leaving,
        }

    def receive(self, sender: Incarnation, message: m.NodeInput, now: float) -> None:
        """`sender` is a member."""
        self._handlers[type(message)](sender, message, now)

    def _reserved(self, sender: Incarnation, message: m.Reserved, now: float) -> None:
        found = self._table.current(message.key, sender)
        if found is None:
            return
        record, attempt = found
        if record.state is not RequestState.PLACED or sender != attempt.decode:
            self._unexpected()
            return
        self._table.loads.heard_of(sender, message.key)
        self._table.reserved(record, attempt, now)
        ticket = message.ticket
        if ticket is None:
            if attempt.prefill is not None and record.awaits_scores:
                who = self._table.name(sender)
                self._table.replace(record, Stale(f"node {who} left no prompt to compute, whose scores are asked"), now)
            elif attempt.prefill is not None:
                attempt.notes.spare_handoff()
                record.marks.spare_handoff()
                self._table.close_leg(attempt, attempt.prefill, Cancelled("decode holds the prompt already"))
        elif ticket.key != attempt.key or ticket.writer != attempt.prefill or ticket.decode.incarnation != sender:
            self._table.replace(record, Stale(f"ticket {ticket.id} is for another attempt or node"), now)
        else:
            self._table.give(attempt, m.GiveTicket(ticket))

    def _refused(self, sender: Incarnation, message: m.Refused, now: float) -> None:
        found = self._table.current(message.key, sender)
        if found is None:
            return
        record, attempt = found
        attempt.notes.needed, attempt.notes.free = message.needed, message.free
        self._table.close_leg(attempt, sender)
        self._table.loads.refused(sender, message, self._table.decisions.demand(record).blocks)
        self._table.replace(record, None, now)

    def _tokens(self, sender: Incarnation, message: m.Tokens, now: float) -> None:
        for key, events in groupby(message.events, key=_key_of):
            found = self._table.current(key, sender)
            if found is not None:
                self._tokens_of(*found, sender, list(events), now)

    def _tokens_of(
        self, record: Record, attempt: Attempt, sender: Incarnation, events: Sequence[TokenEvent], now: float
    ) -> None:
        """Tokens of one sequence in one message. What does not continue the output exactly does not get out."""
        if record.awaits_scores:
            self._hold(record, attempt, sender, events, now)
            return
        fresh: list[int] = []
        fresh_scores: list[TokenScore] = []
        width = scores.width(record.request.sampling.logprobs, self._vocab_size)
        finish: FinishReason | None = None
        error: BatonError | None = None
        for event in events:
            expected = len(record.emitted) + len(fresh)
            if finish is not None or event.index != expected:
                error = Stale(f"node {self._table.name(sender)} sent token {event.index}, expected was {expected}")
                break
            if sender == attempt.prefill and event.finish is None:
                error = Stale(f"prefill node {self._table.name(sender)} sent a token that ends nothing")
                break
            if width is not None:
                if event.score is None or not scores.is_whole(event.score, width):
                    error = Stale(f"node {self._table.name(sender)} sent token {event.index} without the score asked")
                    break
                fresh_scores.append(event.score)
            fresh.append(event.token)
            finish = event.finish
            if finish is None and expected + 1 >= record.request.sampling.max_tokens:
                finish = FinishReason.LENGTH
        if fresh:
            if record.state is not RequestState.STREAMING:
                self._table.loads.heard_of(sender, attempt.key, computed=True, now=now)
                self._table.placeable = True
            if sender == attempt.decode and not attempt.committed:
                self._table.committed(record, attempt)
            self._table.emit(record, attempt, fresh, tuple(fresh_scores), now)
        if finish is not None:
            self._table.close_leg(attempt, sender)
            self._table.end(record, finish, now)
        elif error is not None:
            self._table.replace(record, error, now)

    def _prompt_scores(self, sender: Incarnation, message: m.PromptScores, now: float) -> None:
        found = self._table.current(message.key, sender)
        if found is None:
            return
        record, attempt = found
        if sender != attempt.computes or not record.awaits_scores:
            self._unexpected()
            return
        try:
            scores.collect(record, attempt, message, self._vocab_size)
        except Stale as error:
            self._table.replace(record, error, now)
            return
        self._table.loads.heard_of(sender, message.key)
        self._table.last_progress = now
        if attempt.committed:
            self._table.committed(record, attempt)
        if attempt.held and attempt.decode is not None and not record.awaits_scores:
            held, attempt.held = attempt.held, []
            self._tokens_of(record, attempt, attempt.decode, held, now)

    def _hold(
        self, record: Record, attempt: Attempt, sender: Incarnation, events: Sequence[TokenEvent], now: float
    ) -> None:
        """Tokens of decode, while the prompt's scores are still on their way from prefill."""
        attempt.held += events
        if sender == attempt.computes or len(attempt.held) > record.remaining:
            self._table.replace(record, self._without_scores(record, attempt), now)
            return
        self._table.loads.heard_of(sender, attempt.key, computed=True, now=now)
        self._table.committed(record, attempt)
        self._table.last_progress = now

    def _without_scores(self, record: Record, attempt: Attempt) -> Stale:
        name = self._table.name(attempt.computes)
        come, all_of_them = len(attempt.prompt_scores), len(record.request.prompt) - 1
        return Stale(f"node {name} has computed the prompt and sent {come} of its {all_of_them} scores")

    def _failed(self, sender: Incarnation, message: m.AttemptFailed, now: float) -> None:
        found = self._table.current(message.key, sender)
        if found is None:
            return
        record, attempt = found
        if isinstance(message.error, HandoffFailed):
            self._table.counters.handoffs[message.error.code, attempt.transport or "none"] += 1
            self._judge(attempt, message.error, now)
        self._table.close_leg(attempt, sender)
        if isinstance(message.error, Preempted):
            blocks = self._table.decisions.demand(record).blocks
            self._table.loads.close(sender, blocks, needed=blocks)
        record.prefill_payer = message.caused_by
        error = message.error
        if isinstance(error, Cancelled):  # only clients cancel, and they tell us
            error = NodeFailed(f"node {self._table.name(sender)} gave the request up: {error.message}")
        self._table.replace(record, error, now)

    def _judge(self, attempt: Attempt, error: HandoffFailed, now: float) -> None:
        """Does it count against the two nodes? What is stale is of another life and says nothing about their link."""
        pair = attempt.pair
        if pair is not None and not isinstance(error, Stale) and self._table.breakers.failed(pair, attempt.key, now):
            self._table.pair_changed(pair)

    def _prefill_ended(self, sender: Incarnation, message: m.PrefillEnded, now: float) -> None:
        """Counts while the attempt lasts: decode's word may be faster, and closes the writer's leg."""
        found = self._table.present(message.key)
        if found is None or sender not in (found[1].prefill, found[1].decode):
            self._table.counters.dropped_messages["stale"] += 1
            return
        record, attempt = found
        if sender != attempt.prefill or attempt.ended is not None:
            self._unexpected()
            return
        attempt.ended = message
        if not attempt.notes.handoff_spared:
            attempt.notes.prefill_ended = now
            record.marks.mark("prefill_ended", now)
        self._table.loads.heard_of(sender, message.key, computed=True, now=now)
        self._table.knowledge.computed(sender, message, now)
        count_sources(record, attempt, self._table.counters)
        self._table.placeable = True
        self._table.last_progress = now
        if record.awaits_scores:
            self._table.replace(record, self._without_scores(record, attempt), now)

    def _handed_off(self, sender: Incarnation, message: m.HandedOff, now: float) -> None:
        """Counts whenever it comes: decode's word is often faster, and a short answer may be over by now."""
        key, report, table = message.key, message.report, self._table
        found = table.present(key)
        if found is not None and found[1].prefill == sender:
            record, attempt = found
            news = not attempt.handed_off
            if news:
                table.knowledge.handed_off(sender, attempt.decode, report, now)
            attempt.handed_off = True
            record.marks.mark("committed", now)
            record.marks.handoff = attempt.notes.handoff = report
            attempt.notes.mark_committed(now)
            if sender in attempt.legs:
                table.close_leg(attempt, sender)
                if record.awaits_scores:
                    table.replace(record, self._without_scores(record, attempt), now)
                else:
                    table.committed(record, attempt)
            table.last_progress = now
        else:
            news = key.request not in table.records and table.endings.timelines.add_handoff(key, report)
            if news:
                table.endings.explanations.add_handoff(key, report)
        if news:
            table.counters.handoffs["committed", report.transport] += 1
            table.counters.handoff_bytes[report.transport] += report.bytes
        else:
            table.counters.dropped_messages["stale"] += 1

    def _admitted(self, sender: Incarnation, message: m.Admitted, now: float) -> None:
        found = self._table.current(message.key, sender)
        if found is None:
            return
        record, attempt = found
        if sender != attempt.decode or attempt.admitted is not None:
            self._unexpected()
            return
        attempt.admitted = message
        attempt.notes.mark_committed(now)
        record.marks.mark("committed", now)
        self._table.loads.heard_of(sender, message.key)
        self._table.knowledge.computed(sender, message, now)
        self._table.committed(record, attempt)
        count_sources(record, attempt, self._table.counters)
        self._table.last_progress = now

    def _heartbeat(self, sender: Incarnation, message: m.Heartbeat, now: float) -> None:
        node = self._registry.nodes[sender]
        if node.stats is not None and message.stats.queued_tokens < node.stats.queued_tokens:
            self._table.last_progress = now
        self._table.knowledge.steps(node, node.stats, message.stats, now)
        self._registry.report(node, message.stats)
        self._table.loads.report(sender, message.stats.blocks_free + message.stats.blocks_cached)
        self._table.placeable = True

    def _cache_events(self, sender: Incarnation, message: m.CacheEvents, now: float) -> None:
        if self._table.knowledge.cache_events(sender, message, now):
            self._table.out.append(m.Send(sender, m.CacheQuery()))

    def _cache_snapshot(self, sender: Incarnation, message: m.CacheSnapshot, now: float) -> None:
        self._table.knowledge.cache_snapshot(sender, message)

    def _leaving(self, sender: Incarnation, message: m.Leaving, now: float) -> None:
        self._registry.nodes[sender].leaving = True
        self._table.placeable = True

    @property
    def _vocab_size(self) -> int:
        model = self._registry.model
        return model.vocab_size if model is not None else 0

    def _unexpected(self) -> None:
        self._table.counters.dropped_messages["unexpected"] += 1
