"""A node with a real scheduler and block pool, whose steps take what a cost model says."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from baton.cluster_link.messages import (
    AttemptFailed,
    BlocksReserved,
    CancelOrder,
    DecodeOrder,
    DecodeStarted,
    HandoffCompleted,
    NodeOrder,
    NodeReport,
    PrefillEnded,
    PrefillOrder,
    ReservationRefused,
    StepTokens,
    TicketOrder,
)
from baton.cluster_link.report_types import NodeStats
from baton.kv.blocks import BlockHash
from baton.types import AttemptKey, AttemptSpec, Incarnation, TokenEvent
from node_engine.core.blocks.block_pool import BlockPool
from node_engine.core.metrics.decode_step_totals import DecodeStepTotals
from node_engine.core.metrics.device_time import DeviceTime
from node_engine.core.scheduling.capacity import CapacityRefusal, SchedulerLimits
from node_engine.core.scheduling.scheduler import Scheduler
from node_engine.core.sequences.outcomes import (
    PrefillCompleted,
    SequenceFailed,
    SequenceOutcome,
    TokenEmitted,
)
from node_engine.core.step.step_batch import SliceResult, StepBatch
from node_engine.paced.paced_engine import PACED_LAYOUT
from simulator.decode_batch import SIMULATED_TOKEN
from simulator.node_messages import make_handoff_report, make_ticket, make_ticket_id
from simulator.simulated_cluster import SimulatedCluster

_SAMPLED, _NOT_SAMPLED = SliceResult(SIMULATED_TOKEN), SliceResult(None)


class SchedulerNode:
    """A prefill or a decode node: which one follows from the orders that it gets."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        incarnation: Incarnation,
        *,
        num_blocks: int,
        limits: SchedulerLimits,
        step_seconds: Callable[["SchedulerNode", StepBatch], float],
        handoff_seconds: float,
    ) -> None:
        """A hand-off lands `handoff_seconds` after the last chunk of the prompt."""
        self.incarnation = incarnation
        self.device_time = DeviceTime()
        self._cluster = cluster
        self._pool = BlockPool(num_blocks, PACED_LAYOUT.block_size, lambda: cluster.now)
        self._scheduler = Scheduler(self._pool, limits)
        self._step_seconds = step_seconds
        self._handoff_seconds = handoff_seconds
        self._step_totals = DecodeStepTotals()
        self._is_stepping = False
        self._decode_nodes: dict[AttemptKey, Incarnation] = {}  # by the tickets
        # Attempts whose prompt is complete; before that, seconds of steps that computed it.
        self._started: set[AttemptKey] = set()
        self._prefill_seconds: dict[AttemptKey, float] = {}

    def collect_stats(self) -> NodeStats:
        counts: dict[str, Any] = {
            f"blocks_{state.value}": number
            for state, number in self._pool.ownership.count_blocks_by_state().items()
        }
        return NodeStats(
            blocks_total=self._pool.num_blocks,
            decode_steps=self._step_totals.num_steps,
            decode_step_seconds=self._step_totals.seconds,
            decode_step_sequences=self._step_totals.num_sequences,
            decode_step_tokens=self._step_totals.context_tokens,
            **counts,
        )

    def execute_order(self, order: NodeOrder) -> None:
        match order:
            case PrefillOrder(work):
                self._scheduler.add_sequence(work, _root_hash(work), is_prefill_only=True)
                self._wake()
            case DecodeOrder(work, None, prefill_step_share):
                self._scheduler.prefill_budget.prefill_step_share = prefill_step_share or None
                self._start_local(work)
            case DecodeOrder(work, writer) if writer is not None:
                self._reserve(work, writer.incarnation)
            case TicketOrder(ticket):
                self._decode_nodes[ticket.key] = ticket.decode_peer.incarnation
                self._scheduler.mark_ticketed(ticket.key)
            case CancelOrder(key):
                self._scheduler.cancel_sequence(key)
            case _:
                pass

    def _start_local(self, work: AttemptSpec) -> None:
        """Compute the prompt here, if there is room."""
        root = _root_hash(work)
        refusal = self._scheduler.estimate_admission(work, root).refusal
        if refusal is None:
            self._scheduler.add_sequence(work, root)
            self._wake()
        else:
            self._answer(_make_refusal(work, refusal))

    def _reserve(self, work: AttemptSpec, writer: Incarnation) -> None:
        ticket = make_ticket(self.incarnation, work.key, writer)
        found = self._scheduler.reserve_for_handoff(work, _root_hash(work), ticket.id)
        if isinstance(found, CapacityRefusal):
            self._answer(_make_refusal(work, found))
        else:
            self._answer(BlocksReserved(work.key, ticket, 0))

    def _report(self, report: NodeReport) -> None:
        self._cluster.send_report(self.incarnation, report)

    def _answer(self, report: NodeReport) -> None:
        """Report it once the coordinator is done with what it does now."""
        self._cluster.call_at(self._cluster.now, partial(self._report, report))

    # steps

    def _wake(self) -> None:
        if not self._is_stepping:
            self._is_stepping = True
            self._cluster.call_at(self._cluster.now, self._start_step)

    def _start_step(self) -> None:
        plan = self._scheduler.schedule_step()
        batch = plan.batch
        if batch is None:
            self._is_stepping = False
        else:
            seconds = self._step_seconds(self, batch)
            ended_at = self._cluster.now + seconds
            self._cluster.call_at(ended_at, partial(self._finish_step, batch, seconds))
        if plan.outcomes:
            self._report_outcomes(plan.outcomes)

    def _finish_step(self, batch: StepBatch, seconds: float) -> None:
        self._record_step(batch, seconds)
        results = [_SAMPLED if one.sample_spec else _NOT_SAMPLED for one in batch.slices]
        self._report_outcomes(self._scheduler.update_from_results(batch, results))
        self._start_step()

    def _record_step(self, batch: StepBatch, seconds: float) -> None:
        scheduler = self._scheduler
        self.device_time.charge_step(batch, scheduler.sequences_in_flight, seconds)
        self._step_totals = self._step_totals.with_step(batch, seconds)
        for one in batch.slices:
            key = scheduler.sequences_in_flight[one.sequence_id].key
            if key not in self._started:
                share = seconds * scheduler.prefill_budget.compute_time_share(
                    batch, len(one.token_ids)
                )
                self._prefill_seconds[key] = self._prefill_seconds.get(key, 0.0) + share
        scheduler.prefill_budget.observe_step(batch, seconds)

    def _report_outcomes(self, outcomes: Iterable[SequenceOutcome]) -> None:
        events: list[TokenEvent] = []
        for outcome in outcomes:
            match outcome:
                case TokenEmitted(sequence, event):
                    key = sequence.key
                    if key not in self._started:
                        self._started.add(key)
                        cached = sequence.num_cached_tokens
                        computed = sequence.context_len - cached
                        seconds = self._prefill_seconds.pop(key)
                        self._report(DecodeStarted(key, computed, cached, 0, seconds))
                    events.append(event)
                case SequenceFailed(sequence, error, caused_by):
                    self._prefill_seconds.pop(sequence.key, None)
                    self._report(AttemptFailed(sequence.key, error, caused_by))
                case PrefillCompleted(sequence, event):
                    key = sequence.key
                    cached = sequence.num_cached_tokens
                    computed = sequence.context_len - cached
                    seconds = self._prefill_seconds.pop(key)
                    self._report(PrefillEnded(key, computed, cached, seconds))
                    landed_at = self._cluster.now + self._handoff_seconds
                    self._cluster.call_at(landed_at, partial(self._finish_handoff, key, event))
                case _:
                    raise AssertionError(outcome)
        if events:
            self._report(StepTokens(tuple(events)))

    # hand-offs

    def _finish_handoff(self, key: AttemptKey, event: TokenEvent) -> None:
        decode = self._cluster.nodes[self._decode_nodes.pop(key)]
        assert isinstance(decode, SchedulerNode)
        decode.land_handoff(key, event.token_id, self)

    def land_handoff(self, key: AttemptKey, token_id: int, writer: "SchedulerNode") -> None:
        """The prompt is here, and the token that the prefill node has drawn: decode from there."""
        self._pool.reservations.mark_writing(make_ticket_id(key))
        self._started.add(key)
        outcomes = self._scheduler.commit_handoff(key, (token_id,))
        writer._scheduler.finish_handoff(key)
        sequence = next(one.sequence for one in outcomes if isinstance(one, TokenEmitted))
        self._report(DecodeStarted(key, 0, 0, sequence.context_len))
        report = make_handoff_report(
            sequence.context_len * PACED_LAYOUT.token_bytes, self._handoff_seconds
        )
        writer._report(HandoffCompleted(key, report))
        self._report_outcomes(outcomes)
        self._wake()


def _root_hash(work: AttemptSpec) -> BlockHash:
    return BlockHash(work.request.cache_salt.ljust(32, b"\0"))


def _make_refusal(work: AttemptSpec, refusal: CapacityRefusal) -> ReservationRefused:
    return ReservationRefused(work.key, refusal.needed_blocks, refusal.free_blocks)
