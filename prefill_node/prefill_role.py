"""The prefill role: computes prompts and hands their KV to decode nodes. The life of an attempt:

    PrefillOrder     -> `open_handoff`, then the scheduler: chunks, unticketed until the ticket
    TicketOrder      -> `set_ticket`, on the event loop: it need not wait for the forward pass
    each computed layer -> `announce_layer`: the plane sends it while the next layer is computed
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

from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.cluster_link.messages import CancelOrder, PeerLostNotice, PrefillOrder, TicketOrder
from baton.errors import (
    BatonError,
    Cancelled,
    ContextLengthExceeded,
    HandoffFailed,
    NodeFailed,
    Preempted,
    StaleMessage,
)
from baton.kv.block_hash import root_hash
from baton.kv.pool_types import PoolHit
from baton.pb.common_pb2 import HandoffReport
from baton.process.failpoints import FAILPOINTS
from baton.types import AttemptKey, AttemptSpec, BlockIndex, Incarnation
from kv_transfer.plane import (
    HandoffStats,
    LayerLanded,
    OutboundAborted,
    OutboundCommitted,
    OutboundPlane,
    SealInfo,
)
from node_engine.core.blocks.pool_prefix import PoolPrefix, RefCountedPin
from node_engine.core.node_commands import (
    CoordinatorLost,
    NodeCommand,
    NodeJoined,
    OrderWithPoolHit,
)
from node_engine.core.sequences.outcomes import (
    PrefillCompleted,
    PrefillRequeued,
    PromptLogprobsComputed,
    SequenceFailed,
    SequenceOutcome,
    TokenEmitted,
)
from node_engine.core.sequences.sequence import Sequence, handoff_owner_label
from node_engine.core.step.step_batch import LayerCallback, StepBatch
from node_engine.roles.role_policy import RoleContext, check_work, report_too_long


@dataclass(slots=True, eq=False)
class _PrefillAttempt:
    """State of one attempt, from its PrefillOrder to OutboundCommitted or OutboundAborted."""

    work: AttemptSpec
    needs_no_decode: bool  # the output is one token: no hand-off
    pinned_blocks: list[BlockIndex] = field(default_factory=list)  # logical blocks 0, 1, ...
    pool_pins: list[RefCountedPin] = field(default_factory=list)  # of pool blocks among them
    compute_seconds: float = 0.0  # duration of the steps that it took part in
    share_seconds: float = 0.0  # of these, in proportion to its tokens
    computed_tokens: int = 0
    cached_tokens: int = 0
    is_over: bool = False  # its end is reported, or the coordinator has ended it
    has_ticket: bool = False  # the decode node has done its look-ups and reserved blocks
    unpublished_sequence: Sequence | None = None  # computed; to be published after the ticket

    @property
    def owner_label(self) -> str:
        return handoff_owner_label(self.work.key)


@dataclass(frozen=True, slots=True)
class _LayerAnnouncement:
    """Blocks of one attempt that a step completes, layer by layer."""

    key: AttemptKey
    first_block: int
    blocks: tuple[BlockIndex, ...]


class PrefillRole:
    """A RolePolicy that computes contexts and sends their KV; see the module."""

    def __init__(self, context: RoleContext, plane: OutboundPlane) -> None:
        self._context = context
        self._plane = plane
        self._scheduler = context.scheduler
        self._block_pool = context.block_pool
        self._reporter = context.reporter
        self._pool_connector = context.pool_connector
        self._layout = context.engine.layout
        self._attempts: dict[AttemptKey, _PrefillAttempt] = {}
        self._aborted_early: dict[AttemptKey, BatonError] = {}
        # Of the step in progress: the blocks that it completes, and its attempts with their tokens.
        self._step_announcements: list[_LayerAnnouncement] = []
        self._step_attempts: list[tuple[_PrefillAttempt, int]] = []

    @property
    def transfer_endpoint(self) -> str:
        return self._plane.endpoint

    @property
    def num_held_attempts(self) -> int:
        return len(self._attempts)

    def counters(self) -> dict[str, float]:
        return {
            f"baton_transfer_{name}_total": value for name, value in self._plane.counters().items()
        }

    def close(self) -> None:
        self._plane.close()

    # on the event loop

    def preview_command(self, command: NodeCommand) -> None:
        """Inform the plane at once: it need not wait for the step in progress."""
        match command:
            case NodeJoined(incarnation):
                self._plane.rejoin(incarnation)
            case PrefillOrder(work, needs_no_decode):
                if not needs_no_decode:
                    self._plane.open_handoff(work.key, len(work.context_token_ids))
            case TicketOrder(ticket):
                self._plane.set_ticket(ticket.key, ticket)
            case CancelOrder(key, reason):
                self._plane.abort_handoff(key, reason)
            case PeerLostNotice(incarnation):
                self._plane.on_peer_gone(incarnation)
            case _:
                pass

    # on the compute thread

    def handle_item(self, item: NodeCommand | object) -> None:
        match item:
            case NodeJoined(incarnation):
                self._drop_all_attempts(incarnation)
            case CoordinatorLost():
                self._drop_all_attempts(None)
            case PrefillOrder():
                self._begin_attempt(item, None)
            case OrderWithPoolHit(PrefillOrder() as order, hit):
                self._begin_attempt(order, hit)
            case TicketOrder(ticket):
                self._on_ticket(ticket.key)
            case CancelOrder(key, reason):
                self._end_attempt(key, reason, report=False)
            case OutboundCommitted(key, report):
                self._on_committed(key, report)
            case OutboundAborted(key, error):
                self._on_aborted(key, error)
            case PeerLostNotice() | LayerLanded():
                pass
            case _:
                raise TypeError(f"a prefill node cannot handle {item!r}")

    def before_step(self, batch: StepBatch) -> LayerCallback | None:
        self._step_announcements, self._step_attempts = [], []
        for slice_ in batch.slices:
            sequence = self._scheduler.sequences_in_flight[slice_.sequence_id]
            handoff = self._attempts[sequence.key]
            self._step_attempts.append((handoff, len(slice_.token_ids)))
            if handoff.needs_no_decode:
                continue
            first = slice_.start // self._layout.block_size
            last = self._layout.count_blocks(slice_.start + len(slice_.token_ids))
            if first > len(handoff.pinned_blocks):
                # The blocks before the slice come from a cache: all their layers are complete.
                cached = self._pin_blocks(handoff, sequence, first)
                for layer in range(self._layout.num_layers):
                    self._plane.announce_layer(
                        sequence.key, layer, cached.first_block, cached.blocks
                    )
            self._step_announcements.append(self._pin_blocks(handoff, sequence, last))
        return self._announce_layer if self._step_announcements else None

    def _announce_layer(self, layer: int) -> None:
        FAILPOINTS.hit("prefill.layer.before")
        for announcement in self._step_announcements:
            self._plane.announce_layer(
                announcement.key, layer, announcement.first_block, announcement.blocks
            )
        FAILPOINTS.hit("prefill.layer.after")
        timeout = FAILPOINTS.get_argument("prefill.layer.landed")
        if timeout is not None:
            for announcement in self._step_announcements:
                if not self._plane.wait_for_layer(announcement.key, layer, timeout):
                    raise HandoffFailed(
                        f"layer {layer} of {announcement.key} did not land within {timeout} s"
                    )

    def after_step(
        self, batch: StepBatch, outcomes: Iterable[SequenceOutcome], seconds: float
    ) -> None:
        for handoff, tokens in self._step_attempts:
            handoff.compute_seconds += seconds
            handoff.share_seconds += seconds * tokens / batch.num_tokens
            handoff.computed_tokens += tokens
        self.deliver_outcomes(outcomes)

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
                case TokenEmitted(sequence, _):
                    raise TypeError(f"{sequence.key} is decoding on a prefill node")

    def on_step_failed(self, batch: StepBatch, error: Exception) -> None:
        reason = (
            error
            if isinstance(error, BatonError)
            else NodeFailed(f"{type(error).__name__} in the forward pass")
        )
        failed = [
            self._scheduler.sequences_in_flight[slice_.sequence_id].key for slice_ in batch.slices
        ]
        self._scheduler.abandon_step(batch)
        for key in failed:
            self._end_attempt(key, reason, report=True)

    # the life of one attempt

    def _begin_attempt(self, order: PrefillOrder, hit: PoolHit | None) -> None:
        pool_prefix = self._pool_connector.build_pool_prefix(hit)
        if order.work.key not in self._attempts:  # else the order is a duplicate
            self._begin_with_prefix(order.work, order.needs_no_decode, pool_prefix)
        if pool_prefix is not None:
            pool_prefix.release()

    def _begin_with_prefix(
        self, work: AttemptSpec, needs_no_decode: bool, pool_prefix: PoolPrefix | None
    ) -> None:
        handoff = self._attempts[work.key] = _PrefillAttempt(work, needs_no_decode)
        early = self._aborted_early.pop(work.key, None)
        try:
            if early is not None:
                raise early
            FAILPOINTS.hit("prefill.allocate.before")
            engine = self._context.engine
            check_work(work, engine, context_only=not needs_no_decode)
            root = root_hash(engine.model_digest, self._layout, work.request.cache_salt)
            self._scheduler.add_sequence(work, root, is_prefill_only=True, pool_prefix=pool_prefix)
            if needs_no_decode:
                self._scheduler.mark_ticketed(work.key)
            FAILPOINTS.hit("prefill.allocate.after")
        except BatonError as error:
            if early is not None or needs_no_decode:
                self._forget_attempt(handoff)
            too_long = isinstance(error, ContextLengthExceeded)
            if too_long:
                report_too_long(work, self._block_pool, self._reporter)
            self._end_known_attempt(handoff, error, report=not too_long)

    def _on_ticket(self, key: AttemptKey) -> None:
        if self._scheduler.sequences.get(key) is not None:
            self._scheduler.mark_ticketed(key)
        handoff = self._attempts.get(key)
        if handoff is not None:
            handoff.has_ticket = True
            self._publish_pending(handoff)

    def _publish_pending(self, handoff: _PrefillAttempt) -> None:
        """Publish the computed sequence to the shared pool, unless that was done before."""
        sequence, handoff.unpublished_sequence = handoff.unpublished_sequence, None
        if sequence is not None:
            self._pool_connector.publish_sequence(sequence)

    def _on_prefill_completed(self, sequence: Sequence, outcome: PrefillCompleted) -> None:
        handoff = self._attempts.get(sequence.key)
        if handoff is None or handoff.is_over:
            self._scheduler.cancel_sequence(sequence.key)
            return
        handoff.cached_tokens = sequence.num_cached_tokens
        self._reporter.report_prefill_ended(
            sequence.key,
            computed_tokens=handoff.computed_tokens,
            cached_tokens=sequence.num_cached_tokens,
            compute_seconds=handoff.compute_seconds,
            share_seconds=handoff.share_seconds,
            pool_tokens=sequence.pool_use.num_tokens,
            remote_pool_tokens=sequence.pool_use.num_remote_tokens,
        )
        if handoff.needs_no_decode or outcome.event.finish_reason is not None:
            self._reporter.report_tokens([outcome.event])
            self._pool_connector.publish_sequence(sequence)
            self._end_attempt(
                sequence.key, Cancelled("the first token ends the request"), report=False
            )
            return
        try:
            FAILPOINTS.hit("prefill.seal.before")
            self._plane.seal_handoff(
                sequence.key, SealInfo(sequence.output_token_ids, outcome.event.logprobs)
            )
            FAILPOINTS.hit("prefill.seal.after")
        except BatonError as error:
            self._end_attempt(sequence.key, error, report=True)
            return
        handoff.unpublished_sequence = sequence
        if handoff.has_ticket:
            self._publish_pending(handoff)
        self._scheduler.finish_handoff(
            sequence.key
        )  # the hand-off still holds references on the blocks

    def _on_committed(self, key: AttemptKey, stats: HandoffStats) -> None:
        handoff = self._attempts.get(key)
        if handoff is None:
            return
        self._forget_attempt(handoff)
        if not handoff.is_over:
            self._reporter.report_handed_off(key, _report_to_pb(handoff, stats))

    def _on_aborted(self, key: AttemptKey, error: BatonError) -> None:
        handoff = self._attempts.get(key)
        if handoff is None:  # it ended before its PrefillOrder was handled
            self._aborted_early[key] = error
            return
        self._forget_attempt(handoff)
        self._end_known_attempt(handoff, error, report=True)

    def _end_attempt(self, key: AttemptKey, error: BatonError, *, report: bool) -> None:
        handoff = self._attempts.get(key)
        if handoff is not None:
            self._end_known_attempt(handoff, error, report=report)

    def _end_known_attempt(
        self, handoff: _PrefillAttempt, error: BatonError, *, report: bool
    ) -> None:
        """Stop computing, abort the hand-off and, with `report`, report the error once. Idempotent.

        The references on source blocks are kept until the plane has answered.
        """
        key = handoff.work.key
        self._scheduler.cancel_sequence(key)
        if key in self._attempts:
            if handoff.needs_no_decode:
                self._forget_attempt(handoff)
            else:
                self._plane.abort_handoff(key, error)
        if report and not handoff.is_over:
            self._reporter.report_failed(key, error)
        handoff.is_over = True

    def _pin_blocks(
        self, handoff: _PrefillAttempt, sequence: Sequence, last: int
    ) -> _LayerAnnouncement:
        """Take the hand-off's own references on the logical blocks before `last`."""
        first = len(handoff.pinned_blocks)
        blocks = tuple(sequence.block_table[first:last])
        self._block_pool.share_blocks(blocks, handoff.owner_label)
        handoff.pinned_blocks.extend(blocks)
        handoff.pool_pins.extend(
            pin.acquire() for pin in sequence.pool_use.pins if pin not in handoff.pool_pins
        )
        return _LayerAnnouncement(sequence.key, first, blocks)

    def _forget_attempt(self, handoff: _PrefillAttempt) -> None:
        FAILPOINTS.hit("prefill.free.before")
        del self._attempts[handoff.work.key]
        self._publish_pending(handoff)
        self._block_pool.release_blocks(handoff.pinned_blocks, handoff.owner_label)
        handoff.pinned_blocks.clear()
        for pin in handoff.pool_pins:
            pin.release()
        handoff.pool_pins.clear()
        FAILPOINTS.hit("prefill.free.after")

    def _drop_all_attempts(self, incarnation: Incarnation | None) -> None:
        """The coordinator no longer knows this work: end all attempts, keep the prefix cache."""
        for key in tuple(self._attempts):
            self._end_attempt(key, StaleMessage("this node has joined anew"), report=False)
        if incarnation is not None:
            self._reporter.incarnation = incarnation


def _report_to_pb(handoff: _PrefillAttempt, stats: HandoffStats) -> HandoffReport:
    return HandoffReport(
        transport=stats.transport,
        bytes=stats.bytes_sent,
        slabs=stats.slabs_sent,
        slabs_landed_before_last_layer=stats.slabs_landed_before_last_layer,
        compute_seconds=handoff.compute_seconds,
        exposed_seconds=stats.exposed_seconds,
        commit_seconds=stats.commit_seconds,
        computed_tokens=handoff.computed_tokens,
        cached_tokens=handoff.cached_tokens,
    )
