"""The compute-bound role. The life of an attempt here:

    Prefill    -> `open` on the plane, then the scheduler: chunks, speculative until its ticket is known
    GiveTicket -> the plane knows where to write (told on the event loop: the forward pass need not end first)
    each layer of each chunk -> `layer_ready`: the plane writes it to decode while the next layer is computed
    first token drawn        -> Seal; or, if that token ends the request, the answer itself and no hand-off
    Committed                -> source blocks let go, HandedOff reported              the one good end
    Aborted, Cancel, a failed step, a drop -> source blocks let go, AttemptFailed     every other end

A hand-off holds a reference of its own (a *pin*) on each source block from the moment the block is
announced to the plane until the plane has said Committed or Aborted, and a use of the shared pool's
pins if blocks are the pool's. So a sequence may end at any time: what the plane may still be
reading stays whole.

What the shared pool has of a prompt is not computed. What is computed is published there as soon as
the last Write is announced, which delays nothing, but not before the decode node has answered: its
look-up for the same attempt would take the attempt's own computation for a hit.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

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
    CancelCommand,
    CoordinatorLost,
    NodeCommand,
    NodeJoined,
    PeerLostCommand,
    PrefillCommand,
    TicketCommand,
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
    """What this role knows of one attempt, from Prefill to Committed or Aborted."""

    work: AttemptSpec
    needs_no_decode: bool
    pinned_blocks: list[BlockIndex] = field(
        default_factory=list
    )  # logical blocks 0 .. of the context
    pool_pins: list[RefCountedPin] = field(
        default_factory=list
    )  # under which those of the shared pool are read
    compute_seconds: float = 0.0
    share_seconds: float = 0.0
    computed_tokens: int = 0
    cached_tokens: int = 0
    is_over: bool = (
        False  # the coordinator knows how this attempt ended, or asked for its end itself
    )
    has_ticket: bool = (
        False  # the decode node has looked up what is cached, and promised room for the rest
    )
    unpublished_sequence: Sequence | None = (
        None  # computed, and not given to the shared pool before the ticket is here
    )

    @property
    def owner_label(self) -> str:
        return handoff_owner_label(self.work.key)


@dataclass(frozen=True, slots=True)
class _LayerAnnouncement:
    """Blocks that a step makes final, layer by layer."""

    key: AttemptKey
    first_block: int
    blocks: tuple[BlockIndex, ...]


class PrefillRole:
    def __init__(self, parts: RoleContext, plane: OutboundPlane) -> None:
        self._context = parts
        self._plane = plane
        self._scheduler = parts.scheduler
        self._block_pool = parts.block_pool
        self._reporter = parts.reporter
        self._pool_connector = parts.pool_connector
        self._layout = parts.engine.layout
        self._attempts: dict[AttemptKey, _PrefillAttempt] = {}
        self._aborted_early: dict[AttemptKey, BatonError] = {}
        self._step_announcements: list[
            _LayerAnnouncement
        ] = []  # what the step in progress makes final
        self._step_attempts: list[
            tuple[_PrefillAttempt, int]
        ] = []  # and how many tokens it computes for whom

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

    # on the event loop, in the order of the stream, before the compute thread sees the command

    def preview_command(self, command: NodeCommand) -> None:
        """The plane need not wait for the step in progress: it learns of destinations and of ends
        at once."""
        match command:
            case NodeJoined(incarnation):
                self._plane.rejoin(incarnation)
            case PrefillCommand(work, alone):
                if not alone:
                    self._plane.open_handoff(work.key, len(work.context_token_ids))
            case TicketCommand(ticket):
                self._plane.set_ticket(ticket.key, ticket)
            case CancelCommand(key, reason):
                self._plane.abort_handoff(key, reason)
            case PeerLostCommand(incarnation):
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
            case PrefillCommand(work, alone, hit):
                self._begin_attempt(work, alone, hit)
            case TicketCommand(ticket):
                self._on_ticket(ticket.key)
            case CancelCommand(key, reason):
                self._end_attempt(key, reason, tell=False)
            case OutboundCommitted(key, report):
                self._on_committed(key, report)
            case OutboundAborted(key, error):
                self._on_aborted(key, error)
            case PeerLostCommand() | LayerLanded():
                pass
            case _:
                raise TypeError(f"a prefill node got {item!r}")

    def before_step(self, batch: StepBatch) -> LayerCallback | None:
        self._step_announcements, self._step_attempts = [], []
        for piece in batch.slices:
            sequence = self._scheduler.get_sequence_in_flight(piece.sequence_id)
            handoff = self._attempts[sequence.key]
            self._step_attempts.append((handoff, len(piece.token_ids)))
            if handoff.needs_no_decode:
                continue
            first = piece.start // self._layout.block_size
            last = self._layout.count_blocks(piece.start + len(piece.token_ids))
            if first > len(
                handoff.pinned_blocks
            ):  # a prefix that was in the cache: every layer of it is final already
                cached = self._pin_blocks(handoff, sequence, first)
                for layer in range(self._layout.num_layers):
                    self._plane.announce_layer(
                        sequence.key, layer, cached.first_block, cached.blocks
                    )
            self._step_announcements.append(self._pin_blocks(handoff, sequence, last))
        return self._announce_layer if self._step_announcements else None

    def _announce_layer(self, layer: int) -> None:
        FAILPOINTS.hit("prefill.layer.before")
        for made in self._step_announcements:
            self._plane.announce_layer(made.key, layer, made.first_block, made.blocks)
        FAILPOINTS.hit("prefill.layer.after")
        patience = FAILPOINTS.get_argument("prefill.layer.landed")
        if patience is not None:
            for made in self._step_announcements:
                if not self._plane.wait_for_layer(made.key, layer, patience):
                    raise HandoffFailed(
                        f"layer {layer} of {made.key} did not land within {patience} s"
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
                        Preempted("speculative prefill gave way to one with a ticket"),
                        tell=True,
                    )
                case SequenceFailed(sequence, error):
                    self._end_attempt(sequence.key, error, tell=True)
                case TokenEmitted(sequence, _):
                    raise TypeError(f"{sequence.key} is decoding on a prefill node")

    def on_step_failed(self, batch: StepBatch, error: Exception) -> None:
        reason = (
            error
            if isinstance(error, BatonError)
            else NodeFailed(f"{type(error).__name__} in the forward pass")
        )
        failed = [
            self._scheduler.get_sequence_in_flight(piece.sequence_id).key for piece in batch.slices
        ]
        self._scheduler.abandon_step(batch)
        for key in failed:
            self._end_attempt(key, reason, tell=True)

    # the life of one attempt

    def _begin_attempt(self, work: AttemptSpec, alone: bool, hit: PoolHit | None) -> None:
        pooled = self._pool_connector.build_pool_prefix(hit)
        if work.key not in self._attempts:  # else the message came twice
            self._begin_with_prefix(work, alone, pooled)
        if pooled is not None:
            pooled.release()

    def _begin_with_prefix(self, work: AttemptSpec, alone: bool, pooled: PoolPrefix | None) -> None:
        handoff = self._attempts[work.key] = _PrefillAttempt(work, alone)
        early = self._aborted_early.pop(work.key, None)
        try:
            if early is not None:
                raise early
            FAILPOINTS.hit("prefill.allocate.before")
            engine = self._context.engine
            check_work(work, engine, context_only=not alone)
            root = root_hash(engine.model_digest, self._layout, work.request.cache_salt)
            self._scheduler.add_sequence(work, root, hand_off=True, pooled=pooled)
            if alone:
                self._scheduler.mark_ticketed(work.key)
            FAILPOINTS.hit("prefill.allocate.after")
        except BatonError as error:
            if early is not None or alone:
                self._forget_attempt(handoff)
            too_long = isinstance(error, ContextLengthExceeded)
            if too_long:
                report_too_long(work, self._block_pool, self._reporter)
            self._end_known_attempt(handoff, error, tell=not too_long)

    def _on_ticket(self, key: AttemptKey) -> None:
        if self._scheduler.get_sequence(key) is not None:
            self._scheduler.mark_ticketed(key)
        handoff = self._attempts.get(key)
        if handoff is not None:
            handoff.has_ticket = True
            self._publish_pending(handoff)

    def _publish_pending(self, handoff: _PrefillAttempt) -> None:
        """Give the shared pool what was computed, if that is still to be done."""
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
            handoff.computed_tokens,
            sequence.num_cached_tokens,
            handoff.compute_seconds,
            handoff.share_seconds,
            pooled=sequence.num_pool_tokens,
            remote=sequence.num_remote_pool_tokens,
        )
        if handoff.needs_no_decode or outcome.event.finish_reason is not None:
            self._reporter.report_tokens([outcome.event])
            self._pool_connector.publish_sequence(sequence)
            self._end_attempt(
                sequence.key, Cancelled("the first token ends the request"), tell=False
            )
            return
        try:
            FAILPOINTS.hit("prefill.seal.before")
            self._plane.seal_handoff(
                sequence.key, SealInfo(sequence.output_token_ids, outcome.event.logprobs)
            )
            FAILPOINTS.hit("prefill.seal.after")
        except BatonError as error:
            self._end_attempt(sequence.key, error, tell=True)
            return
        handoff.unpublished_sequence = sequence
        if handoff.has_ticket:
            self._publish_pending(handoff)
        self._scheduler.finish_handoff(sequence.key)  # the pins hold what the plane still reads

    def _on_committed(self, key: AttemptKey, report: HandoffStats) -> None:
        handoff = self._attempts.get(key)
        if handoff is None:
            return
        self._forget_attempt(handoff)
        if not handoff.is_over:
            self._reporter.report_handed_off(key, _report_to_pb(handoff, report))

    def _on_aborted(self, key: AttemptKey, error: BatonError) -> None:
        handoff = self._attempts.get(key)
        if handoff is None:  # it was over before its Prefill was taken up
            self._aborted_early[key] = error
            return
        self._forget_attempt(handoff)
        self._end_known_attempt(handoff, error, tell=True)

    def _end_attempt(self, key: AttemptKey, error: BatonError, *, tell: bool) -> None:
        handoff = self._attempts.get(key)
        if handoff is not None:
            self._end_known_attempt(handoff, error, tell=tell)

    def _end_known_attempt(
        self, handoff: _PrefillAttempt, error: BatonError, *, tell: bool
    ) -> None:
        """Stop computing, have the plane let go, and tell the coordinator once. Idempotent. The
        pins stay until the plane has answered."""
        key = handoff.work.key
        self._scheduler.cancel_sequence(key)
        if key in self._attempts:
            if handoff.needs_no_decode:
                self._forget_attempt(handoff)
            else:
                self._plane.abort_handoff(key, error)
        if tell and not handoff.is_over:
            self._reporter.report_failed(key, error)
        handoff.is_over = True

    def _pin_blocks(
        self, handoff: _PrefillAttempt, sequence: Sequence, last: int
    ) -> _LayerAnnouncement:
        """Take the hand-off's own reference on the logical blocks up to `last`."""
        first = len(handoff.pinned_blocks)
        blocks = tuple(sequence.block_table[first:last])
        self._block_pool.share_blocks(blocks, handoff.owner_label)
        handoff.pinned_blocks.extend(blocks)
        handoff.pool_pins.extend(
            hold.acquire() for hold in sequence.pool_pins if hold not in handoff.pool_pins
        )
        return _LayerAnnouncement(sequence.key, first, blocks)

    def _forget_attempt(self, handoff: _PrefillAttempt) -> None:
        FAILPOINTS.hit("prefill.free.before")
        del self._attempts[handoff.work.key]
        self._publish_pending(handoff)
        self._block_pool.release_blocks(handoff.pinned_blocks, handoff.owner_label)
        handoff.pinned_blocks.clear()
        for hold in handoff.pool_pins:
            hold.release()
        handoff.pool_pins.clear()
        FAILPOINTS.hit("prefill.free.after")

    def _drop_all_attempts(self, incarnation: Incarnation | None) -> None:
        """The coordinator that gave us this work is gone or knows us no more: keep the cache, drop
        the rest."""
        for key in tuple(self._attempts):
            self._end_attempt(key, StaleMessage("this node has joined anew"), tell=False)
        if incarnation is not None:
            self._reporter.incarnation = incarnation


def _report_to_pb(handoff: _PrefillAttempt, report: HandoffStats) -> HandoffReport:
    return HandoffReport(
        transport=report.transport,
        bytes=report.bytes_sent,
        slabs=report.slabs_sent,
        slabs_landed_before_last_layer=report.slabs_landed_before_last_layer,
        compute_seconds=handoff.compute_seconds,
        exposed_seconds=report.exposed_seconds,
        commit_seconds=report.commit_seconds,
        computed_tokens=handoff.computed_tokens,
        cached_tokens=handoff.cached_tokens,
    )
