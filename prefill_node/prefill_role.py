"""The prefill role: computes prompts and hands their KV to decode nodes. The life of an attempt:

    PrefillOrder       -> `open_handoff`, then the scheduler: chunks, unticketed until the ticket
    TicketOrder        -> `set_ticket`, on the event loop, or once a GPU's step is launched
    computed layers     -> `announce_layer`: the plane sends them while the next ones are computed
    first token        -> `seal_handoff`; if it ends the request, the answer and no hand-off
    OutboundCommitted  -> source blocks released, HandedOff reported (success)
    OutboundAborted, cancel, failed step, requeue -> blocks released, AttemptFailed reported

A hand-off holds its own reference on each source block from the announcement of the block to the
plane until the plane reports OutboundCommitted or OutboundAborted, and a reference on the shared
pool's pins for pool blocks. A sequence may therefore end at any time: blocks that the plane may
still be reading are kept.

What the shared pool has of a prompt is not computed. Computed blocks are published there after the
last layer is announced, so that nothing is delayed, but not before the decode node has answered:
its look-up for the same attempt would count the attempt's own computation as a hit.
"""

from collections.abc import Collection, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field

from baton.cluster_link.messages import (
    CancelOrder,
    DecodeOrder,
    PeerLostNotice,
    PrefillOrder,
    TicketOrder,
)
from baton.cluster_link.report_types import HandoffReport
from baton.errors import BatonError, Cancelled, Preempted, StaleMessage
from baton.process.failpoints import FAILPOINTS, failpoint
from baton.types import AttemptKey, AttemptSpec, BlockIndex, Incarnation
from kv_transfer.plane import (
    HandoffStats,
    OutboundAborted,
    OutboundCommitted,
    OutboundPlane,
    SealInfo,
    reads_device_memory,
)
from node_engine.core.blocks.pool_prefix import PoolPrefix, RefCountedPin
from node_engine.core.node_commands import NodeCommand, NodeJoined
from node_engine.core.sequences.outcomes import (
    DraftsVerified,
    PrefillCompleted,
    PrefillRequeued,
    PromptLogprobsComputed,
    SequenceFailed,
    SequenceOutcome,
    TokenEmitted,
)
from node_engine.core.sequences.sequence import Sequence, handoff_owner_label
from node_engine.core.step.step_batch import SequenceId, SequenceSlice, StepBatch
from node_engine.roles.base_role import BaseRole
from node_engine.roles.role_policy import RoleContext
from prefill_node.layer_announcer import BlockRange, LayerAnnouncer
from prefill_node.step_announcements import StepAnnouncements


@dataclass(slots=True, eq=False)
class _PrefillAttempt:
    """State of one attempt, from its PrefillOrder to OutboundCommitted or OutboundAborted."""

    work: AttemptSpec
    needs_no_decode: bool  # the output is one token: no hand-off
    pinned_blocks: list[BlockIndex] = field(default_factory=list)  # logical blocks 0, 1, ...
    pool_pins: list[RefCountedPin] = field(default_factory=list)  # of pool blocks among them
    compute_seconds: float = 0.0  # duration of the steps that it took part in
    share_seconds: float = 0.0  # of these, in proportion to its tokens
    slowed_seconds: float = 0.0  # of `compute_seconds`, spent because of hand-offs
    group_layers: int = 0  # that its last step announced together
    computed_tokens: int = 0
    cached_tokens: int = 0
    is_over: bool = False  # its end is reported, or the coordinator has ended it
    has_ticket: bool = False  # the decode node has done its look-ups and reserved blocks
    unpublished_sequence: Sequence | None = None  # computed; to be published after the ticket

    @property
    def owner_label(self) -> str:
        return handoff_owner_label(self.work.key)


class PrefillRole(BaseRole):
    """A RolePolicy that computes contexts and sends their KV; see the module."""

    def __init__(self, context: RoleContext, plane: OutboundPlane) -> None:
        super().__init__(context, plane)
        self._plane = plane
        self._attempts: dict[AttemptKey, _PrefillAttempt] = {}
        self._aborted_early: dict[AttemptKey, BatonError] = {}  # before their PrefillOrder
        # Attempts of the step in progress with their tokens in it.
        self._step_attempts: dict[SequenceId, _PrefillAttempt] = {}
        self._announcements = StepAnnouncements(
            plane, self._layout, context.config.layers_per_message, context.clock
        )

    @property
    def num_held_attempts(self) -> int:
        return len(self._attempts)

    def counters(self) -> dict[str, float]:
        return super().counters() | self._announcements.counters()

    # on the event loop

    def preview_command(self, command: NodeCommand) -> None:
        """Inform the plane: it need not wait for the step in progress to end."""
        if not isinstance(command, PrefillOrder | TicketOrder):
            self._announcements.tickets.pass_on()
        match command:
            case NodeJoined(incarnation):
                self._plane.rejoin(incarnation)
            case PrefillOrder(work, needs_no_decode):
                if not needs_no_decode:
                    self._plane.open_handoff(work.key, len(work.context_token_ids))
            case TicketOrder(ticket):
                self._announcements.tickets.add(ticket)
            case CancelOrder(key, reason):
                self._plane.abort_handoff(key, reason)
            case PeerLostNotice(incarnation):
                self._plane.on_peer_gone(incarnation)
            case _:
                pass

    # on the compute thread

    def _handle_event(self, item: object) -> None:
        match item:
            case TicketOrder(ticket):
                self._on_ticket(ticket.key)
            case OutboundCommitted(key, report):
                self._on_committed(key, report)
            case OutboundAborted(key, error):
                self._on_aborted(key, error)
            case PeerLostNotice():
                pass
            case _:
                raise TypeError(f"a prefill node cannot handle {item!r}")

    def _on_joined(self, incarnation: Incarnation) -> None:
        """`preview_command` has told the plane."""

    def before_step(self, batch: StepBatch) -> LayerAnnouncer | None:
        self._step_attempts = {}
        completing: list[tuple[_PrefillAttempt, Sequence, int]] = []  # before which logical block
        clock, slowed_seconds = self._context.clock, 0.0
        for slice_ in batch.slices:
            sequence = self._scheduler.sequences_in_flight[slice_.sequence_id]
            attempt = self._attempts[sequence.key]
            self._step_attempts[slice_.sequence_id] = attempt
            if attempt.needs_no_decode:
                continue
            first = slice_.start // self._layout.block_size
            last = self._layout.count_blocks(slice_.start + len(slice_.token_ids))
            if first > len(attempt.pinned_blocks):
                started = clock()
                self._announce_cached_blocks(self._pin_blocks(attempt, sequence, first))
                slowed_seconds += clock() - started
            completing.append((attempt, sequence, last))
        if not completing:
            return None
        return self._announcements.begin_step(
            batch,
            lambda: [self._pin_blocks(*each) for each in completing],
            min(map(self._count_tokens_left, batch.slices)),
            slowed_seconds,
        )

    def _count_tokens_left(self, slice_: SequenceSlice) -> int:
        """Tokens of the slice's context that are left to compute after its step."""
        sequence = self._scheduler.sequences_in_flight[slice_.sequence_id]
        return max(0, sequence.context_len - slice_.start - len(slice_.token_ids))

    def _announce_cached_blocks(self, cached: BlockRange) -> None:
        """Blocks before the first slice come from a cache: all their layers are complete."""
        saved = () if reads_device_memory(self._plane) else cached.blocks
        self._context.engine.save_blocks(saved).result()  # ends what is loaded, too
        self._plane.announce_layer(
            cached.key, 0, cached.first_block, cached.blocks, self._layout.num_layers
        )

    def after_step(
        self, batch: StepBatch, outcomes: Iterable[SequenceOutcome], seconds: float
    ) -> None:
        announced = self._announcements.end_step(batch, seconds)
        for slice_ in batch.slices:
            attempt, tokens = self._step_attempts[slice_.sequence_id], len(slice_.token_ids)
            attempt.compute_seconds += seconds
            attempt.slowed_seconds += announced.slowed_seconds
            attempt.group_layers = announced.group_layers
            attempt.share_seconds += seconds * tokens / batch.num_tokens
            attempt.computed_tokens += tokens
        self.deliver_outcomes(outcomes)

    def on_step_failed(self, batch: StepBatch, error: Exception) -> None:
        self._announcements.abandon_step()
        super().on_step_failed(batch, error)

    def deliver_outcomes(self, outcomes: Iterable[SequenceOutcome]) -> None:
        for outcome in outcomes:
            match outcome:
                case PromptLogprobsComputed(sequence, first, scores):
                    self._reporter.report_prompt_logprobs(sequence.key, first, scores)
                case PrefillCompleted(sequence, _):
                    self._on_prefill_completed(sequence, outcome)
                case PrefillRequeued(sequence):
                    self._end_attempt(
                        sequence.key,
                        Preempted("unticketed prefill was requeued for other work"),
                        report=True,
                    )
                case SequenceFailed(sequence, error):
                    self._end_attempt(sequence.key, error, report=True)
                case TokenEmitted(sequence, _) | DraftsVerified(sequence, _):
                    raise TypeError(f"{sequence.key} is decoding on a prefill node")

    # the life of one attempt

    def _start_attempt(
        self, order: PrefillOrder | DecodeOrder, pool_prefix: PoolPrefix | None
    ) -> None:
        if not isinstance(order, PrefillOrder):
            raise TypeError(f"a prefill node cannot handle {order!r}")
        work, needs_no_decode = order.work, order.needs_no_decode
        early = self._aborted_early.pop(work.key, None)
        if early is not None:
            self._reporter.report_failed(work.key, early)
            return
        self._attempts[work.key] = _PrefillAttempt(work, needs_no_decode)
        with failpoint("prefill.allocate") if FAILPOINTS.armed else nullcontext():
            self._add_sequence(work, needs_no_decode, pool_prefix)

    def _add_sequence(
        self, work: AttemptSpec, needs_no_decode: bool, pool_prefix: PoolPrefix | None
    ) -> None:
        self._check_work(work, context_only=not needs_no_decode)
        root = self._compute_root_hash(work)
        self._scheduler.add_sequence(
            work,
            root,
            is_prefill_only=True,
            pool_prefix=pool_prefix,
            constraint=self._context.constraints.take_constraint(work),
        )
        if needs_no_decode:
            self._scheduler.mark_ticketed(work.key)

    def _on_ticket(self, key: AttemptKey) -> None:
        if self._scheduler.sequences.get(key) is not None:
            self._scheduler.mark_ticketed(key)
        attempt = self._attempts.get(key)
        if attempt is not None:
            attempt.has_ticket = True
            self._publish_pending(attempt)

    def _publish_pending(self, attempt: _PrefillAttempt) -> None:
        """Publish the computed sequence to the shared pool, unless that was done before."""
        sequence, attempt.unpublished_sequence = attempt.unpublished_sequence, None
        if sequence is not None:
            self._pool_connector.publish_sequence(sequence)

    def _on_prefill_completed(self, sequence: Sequence, outcome: PrefillCompleted) -> None:
        attempt = self._attempts.get(sequence.key)
        if attempt is None or attempt.is_over:
            self._scheduler.cancel_sequence(sequence.key)
            return
        attempt.cached_tokens = sequence.num_cached_tokens
        self._reporter.report_prefill_ended(
            sequence.key,
            computed_tokens=attempt.computed_tokens,
            cached_tokens=sequence.num_cached_tokens,
            compute_seconds=attempt.compute_seconds,
            share_seconds=attempt.share_seconds,
            pool_tokens=sequence.pool_use.num_tokens,
            remote_pool_tokens=sequence.pool_use.num_remote_tokens,
        )
        if attempt.needs_no_decode or outcome.event.finish_reason is not None:
            self._reporter.report_tokens([outcome.event])
            self._pool_connector.publish_sequence(sequence)
            self._end_attempt(
                sequence.key, Cancelled("the first token ends the request"), report=False
            )
            return
        try:
            with failpoint("prefill.seal"):
                self._plane.seal_handoff(
                    sequence.key, SealInfo(sequence.output_token_ids, outcome.event.logprobs)
                )
        except BatonError as error:
            self._end_attempt(sequence.key, error, report=True)
            return
        attempt.unpublished_sequence = sequence
        if attempt.has_ticket:
            self._publish_pending(attempt)
        # The hand-off still holds references on the blocks.
        self._scheduler.finish_handoff(sequence.key)

    def _on_committed(self, key: AttemptKey, stats: HandoffStats) -> None:
        attempt = self._attempts.get(key)
        if attempt is None:
            return
        self._forget_attempt(attempt)
        if not attempt.is_over:
            self._reporter.report_handed_off(key, _build_handoff_report(attempt, stats))

    def _on_aborted(self, key: AttemptKey, error: BatonError) -> None:
        attempt = self._attempts.get(key)
        if attempt is None:  # it ended before its PrefillOrder was handled
            self._aborted_early[key] = error
            return
        self._forget_attempt(attempt)
        self._end_known_attempt(attempt, error, report=True)

    def _end_attempt(self, key: AttemptKey, error: BatonError, *, report: bool) -> None:
        attempt = self._attempts.get(key)
        if attempt is not None:
            self._end_known_attempt(attempt, error, report=report)

    def _end_known_attempt(
        self, attempt: _PrefillAttempt, error: BatonError, *, report: bool
    ) -> None:
        """Stop computing, abort the hand-off and, with `report`, report the error once. Idempotent.

        The references on source blocks are kept until the plane has answered.
        """
        key = attempt.work.key
        self._scheduler.cancel_sequence(key)
        if key in self._attempts:
            if attempt.needs_no_decode:
                self._forget_attempt(attempt)
            else:
                self._plane.abort_handoff(key, error)
        if report and not attempt.is_over:
            self._reporter.report_failed(key, error)
        attempt.is_over = True

    def _pin_blocks(self, attempt: _PrefillAttempt, sequence: Sequence, last: int) -> BlockRange:
        """Take the hand-off's own references on the logical blocks before `last`."""
        first = len(attempt.pinned_blocks)
        blocks = tuple(sequence.block_table[first:last])
        self._block_pool.share_blocks(blocks, attempt.owner_label)
        attempt.pinned_blocks.extend(blocks)
        attempt.pool_pins.extend(
            pin.acquire() for pin in sequence.pool_use.pins if pin not in attempt.pool_pins
        )
        return BlockRange(sequence.key, first, blocks)

    @failpoint("prefill.free")
    def _forget_attempt(self, attempt: _PrefillAttempt) -> None:
        del self._attempts[attempt.work.key]
        self._publish_pending(attempt)
        self._block_pool.release_blocks(attempt.pinned_blocks, attempt.owner_label)
        attempt.pinned_blocks.clear()
        for pin in attempt.pool_pins:
            pin.release()
        attempt.pool_pins.clear()

    def _is_known(self, key: AttemptKey) -> bool:
        return key in self._attempts

    def _list_attempts(self) -> Collection[AttemptKey]:
        return tuple(self._attempts)

    def _coordinator_lost_error(self) -> BatonError:
        return StaleMessage("this node has no coordinator")


def _build_handoff_report(attempt: _PrefillAttempt, stats: HandoffStats) -> HandoffReport:
    return HandoffReport(
        transport=stats.transport,
        bytes=stats.bytes_sent,
        slabs=stats.slabs_sent,
        slabs_landed_before_last_layer=stats.slabs_landed_before_last_layer,
        compute_seconds=attempt.compute_seconds,
        slowed_seconds=attempt.slowed_seconds,
        group_layers=attempt.group_layers,
        exposed_seconds=stats.exposed_seconds,
        commit_seconds=stats.commit_seconds,
        computed_tokens=attempt.computed_tokens,
        cached_tokens=attempt.cached_tokens,
    )
