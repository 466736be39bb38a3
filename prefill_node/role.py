"""The compute-bound role. The life of an attempt here:

    Prefill    -> `open` on the plane, then the scheduler: chunks, speculative until its ticket is known
    GiveTicket -> the plane knows where to write (told on the event loop: the forward pass need not end first)
    each layer of each chunk -> `layer_ready`: the plane writes it to decode while the next layer is computed
    first token drawn        -> Seal; or, if that token ends the request, the answer itself and no hand-off
    Committed                -> source blocks let go, HandedOff reported              the one good end
    Aborted, Cancel, a failed step, a drop -> source blocks let go, AttemptFailed     every other end

A hand-off holds a reference of its own (a *pin*) on each source block from the moment the block is announced to the
plane until the plane has said Committed or Aborted, and a use of the shared pool's pins if blocks are the pool's. So a
sequence may end at any time: what the plane may still be reading stays whole.

What the shared pool has of a prompt is not computed. What is computed is published there as soon as the last Write is
announced, which delays nothing, but not before the decode node has answered: its look-up for the same attempt would
take the attempt's own computation for a hit.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.block_hash import root_hash
from baton.errors import BatonError, Cancelled, HandoffFailed, NodeFailed, Preempted, Stale, TooLong
from baton.failpoints import FAILPOINTS
from baton.pb.common_pb2 import HandoffReport
from baton.pool_terms import PoolHit
from baton.types import AttemptKey, BlockIndex, Incarnation, Work
from kv_transfer.plane import Aborted, Committed, LayerLanded, OutboundPlane, OutboundReport, SealInfo
from node_engine.core.messages import Cancel, Command, CoordinatorLost, GiveTicket, Joined, PeerGone, Prefill
from node_engine.core.outcome import Dropped, Emitted, Failed, Outcome, PrefillCompleted, PromptScored
from node_engine.core.pooled import Pooled, PoolHold
from node_engine.core.sequence import Sequence, pin_label
from node_engine.core.step import OnLayer, StepBatch
from node_engine.role import NodeParts, check_work, refuse_too_long


@dataclass(slots=True, eq=False)
class _Handoff:
    """What this role knows of one attempt, from Prefill to Committed or Aborted."""

    work: Work
    alone: bool
    pinned: list[BlockIndex] = field(default_factory=list)  # logical blocks 0 .. of the context
    holds: list[PoolHold] = field(default_factory=list)  # under which those of the shared pool are read
    compute_seconds: float = 0.0
    share_seconds: float = 0.0
    computed_tokens: int = 0
    cached_tokens: int = 0
    over: bool = False  # the coordinator knows how this attempt ended, or asked for its end itself
    ticketed: bool = False  # the decode node has looked up what is cached, and promised room for the rest
    unpublished: Sequence | None = None  # computed, and not given to the shared pool before the ticket is here

    @property
    def pin(self) -> str:
        return pin_label(self.work.key)


@dataclass(frozen=True, slots=True)
class _Announcement:
    """Blocks that a step makes final, layer by layer."""

    key: AttemptKey
    first: int
    blocks: tuple[BlockIndex, ...]


class PrefillRole:
    def __init__(self, parts: NodeParts, plane: OutboundPlane) -> None:
        self._parts = parts
        self._plane = plane
        self._scheduler = parts.scheduler
        self._pool = parts.pool
        self._report = parts.report
        self._sharing = parts.sharing
        self._layout = parts.engine.layout
        self._handoffs: dict[AttemptKey, _Handoff] = {}
        self._aborted_early: dict[AttemptKey, BatonError] = {}
        self._step: list[_Announcement] = []  # what the step in progress makes final
        self._computing: list[tuple[_Handoff, int]] = []  # and how many tokens it computes for whom

    @property
    def transfer_endpoint(self) -> str:
        return self._plane.endpoint

    @property
    def holding(self) -> int:
        return len(self._handoffs)

    def counters(self) -> dict[str, float]:
        return {f"baton_transfer_{name}_total": value for name, value in self._plane.counters().items()}

    def close(self) -> None:
        self._plane.close()

    # on the event loop, in the order of the stream, before the compute thread sees the command

    def preview(self, command: Command) -> None:
        """The plane need not wait for the step in progress: it learns of destinations and of ends at once."""
        match command:
            case Joined(incarnation):
                self._plane.rejoin(incarnation)
            case Prefill(work, alone):
                if not alone:
                    self._plane.open(work.key, len(work.context))
            case GiveTicket(ticket):
                self._plane.ticket(ticket.key, ticket)
            case Cancel(key, reason):
                self._plane.abort(key, reason)
            case PeerGone(incarnation):
                self._plane.peer_gone(incarnation)
            case _:
                pass

    # on the compute thread

    def handle(self, item: Command | object) -> None:
        match item:
            case Joined(incarnation):
                self._drop_everything(incarnation)
            case CoordinatorLost():
                self._drop_everything(None)
            case Prefill(work, alone, hit):
                self._begin(work, alone, hit)
            case GiveTicket(ticket):
                self._ticketed(ticket.key)
            case Cancel(key, reason):
                self._end(key, reason, tell=False)
            case Committed(key, report):
                self._committed(key, report)
            case Aborted(key, error):
                self._aborted(key, error)
            case PeerGone() | LayerLanded():
                pass
            case _:
                raise TypeError(f"a prefill node got {item!r}")

    def before_step(self, batch: StepBatch) -> OnLayer | None:
        self._step, self._computing = [], []
        for piece in batch.slices:
            sequence = self._scheduler.computing(piece.sequence)
            handoff = self._handoffs[sequence.key]
            self._computing.append((handoff, len(piece.tokens)))
            if handoff.alone:
                continue
            first = piece.start // self._layout.block_size
            last = self._layout.blocks_for(piece.start + len(piece.tokens))
            if first > len(handoff.pinned):  # a prefix that was in the cache: every layer of it is final already
                cached = self._pin(handoff, sequence, first)
                for layer in range(self._layout.num_layers):
                    self._plane.layer_ready(sequence.key, layer, cached.first, cached.blocks)
            self._step.append(self._pin(handoff, sequence, last))
        return self._announce_layer if self._step else None

    def _announce_layer(self, layer: int) -> None:
        FAILPOINTS.hit("prefill.layer.before")
        for made in self._step:
            self._plane.layer_ready(made.key, layer, made.first, made.blocks)
        FAILPOINTS.hit("prefill.layer.after")
        patience = FAILPOINTS.argument("prefill.layer.landed")
        if patience is not None:
            for made in self._step:
                if not self._plane.wait_landed(made.key, layer, patience):
                    raise HandoffFailed(f"layer {layer} of {made.key} did not land within {patience} s")

    def after_step(self, batch: StepBatch, outcomes: Iterable[Outcome], seconds: float) -> None:
        for handoff, tokens in self._computing:
            handoff.compute_seconds += seconds
            handoff.share_seconds += seconds * tokens / batch.num_tokens
            handoff.computed_tokens += tokens
        self.deliver(outcomes)

    def deliver(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            match outcome:
                case PromptScored(sequence, first, scores):
                    self._report.prompt_scores(sequence.key, first, scores)
                case PrefillCompleted(sequence, _):
                    self._prefilled(sequence, outcome)
                case Dropped(sequence):
                    self._end(sequence.key, Preempted("speculative prefill gave way to one with a ticket"), tell=True)
                case Failed(sequence, error):
                    self._end(sequence.key, error, tell=True)
                case Emitted(sequence, _):
                    raise TypeError(f"{sequence.key} is decoding on a prefill node")

    def step_failed(self, batch: StepBatch, error: Exception) -> None:
        reason = error if isinstance(error, BatonError) else NodeFailed(f"{type(error).__name__} in the forward pass")
        failed = [self._scheduler.computing(piece.sequence).key for piece in batch.slices]
        self._scheduler.abandon(batch)
        for key in failed:
            self._end(key, reason, tell=True)

    # the life of one attempt

    def _begin(self, work: Work, alone: bool, hit: PoolHit | None) -> None:
        pooled = self._sharing.pooled(hit)
        if work.key not in self._handoffs:  # else the message came twice
            self._begin_with(work, alone, pooled)
        if pooled is not None:
            pooled.done()

    def _begin_with(self, work: Work, alone: bool, pooled: Pooled | None) -> None:
        handoff = self._handoffs[work.key] = _Handoff(work, alone)
        early = self._aborted_early.pop(work.key, None)
        try:
            if early is not None:
                raise early
            FAILPOINTS.hit("prefill.allocate.before")
            engine = self._parts.engine
            check_work(work, engine, context_only=not alone)
            root = root_hash(engine.model_digest, self._layout, work.request.cache_salt)
            self._scheduler.add(work, root, hand_off=True, pooled=pooled)
            if alone:
                self._scheduler.ticket_arrived(work.key)
            FAILPOINTS.hit("prefill.allocate.after")
        except BatonError as error:
            if early is not None or alone:
                self._forget(handoff)
            too_long = isinstance(error, TooLong)
            if too_long:
                refuse_too_long(work, self._pool, self._report)
            self._end_known(handoff, error, tell=not too_long)

    def _ticketed(self, key: AttemptKey) -> None:
        if self._scheduler.get(key) is not None:
            self._scheduler.ticket_arrived(key)
        handoff = self._handoffs.get(key)
        if handoff is not None:
            handoff.ticketed = True
            self._publish(handoff)

    def _publish(self, handoff: _Handoff) -> None:
        """Give the shared pool what was computed, if that is still to be done."""
        sequence, handoff.unpublished = handoff.unpublished, None
        if sequence is not None:
            self._sharing.publish(sequence)

    def _prefilled(self, sequence: Sequence, outcome: PrefillCompleted) -> None:
        handoff = self._handoffs.get(sequence.key)
        if handoff is None or handoff.over:
            self._scheduler.cancel(sequence.key)
            return
        handoff.cached_tokens = sequence.num_cached
        self._report.prefill_ended(
            sequence.key,
            handoff.computed_tokens,
            sequence.num_cached,
            handoff.compute_seconds,
            handoff.share_seconds,
            pooled=sequence.num_pooled,
            remote=sequence.num_remote,
        )
        if handoff.alone or outcome.event.finish is not None:
            self._report.tokens([outcome.event])
            self._sharing.publish(sequence)
            self._end(sequence.key, Cancelled("the first token ends the request"), tell=False)
            return
        try:
            FAILPOINTS.hit("prefill.seal.before")
            self._plane.seal(sequence.key, SealInfo(sequence.output, outcome.event.score))
            FAILPOINTS.hit("prefill.seal.after")
        except BatonError as error:
            self._end(sequence.key, error, tell=True)
            return
        handoff.unpublished = sequence
        if handoff.ticketed:
            self._publish(handoff)
        self._scheduler.release(sequence.key)  # the pins hold what the plane still reads

    def _committed(self, key: AttemptKey, report: OutboundReport) -> None:
        handoff = self._handoffs.get(key)
        if handoff is None:
            return
        self._forget(handoff)
        if not handoff.over:
            self._report.handed_off(key, _report_to_pb(handoff, report))

    def _aborted(self, key: AttemptKey, error: BatonError) -> None:
        handoff = self._handoffs.get(key)
        if handoff is None:  # it was over before its Prefill was taken up
            self._aborted_early[key] = error
            return
        self._forget(handoff)
        self._end_known(handoff, error, tell=True)

    def _end(self, key: AttemptKey, error: BatonError, *, tell: bool) -> None:
        handoff = self._handoffs.get(key)
        if handoff is not None:
            self._end_known(handoff, error, tell=tell)

    def _end_known(self, handoff: _Handoff, error: BatonError, *, tell: bool) -> None:
        """Stop computing, have the plane let go, and tell the coordinator once. Idempotent. The pins stay until the
        plane has answered."""
        key = handoff.work.key
        self._scheduler.cancel(key)
        if key in self._handoffs:
            if handoff.alone:
                self._forget(handoff)
            else:
                self._plane.abort(key, error)
        if tell and not handoff.over:
            self._report.failed(key, error)
        handoff.over = True

    def _pin(self, handoff: _Handoff, sequence: Sequence, last: int) -> _Announcement:
        """Take the hand-off's own reference on the logical blocks up to `last`."""
        first = len(handoff.pinned)
        blocks = tuple(sequence.block_table[first:last])
        self._pool.share(blocks, handoff.pin)
        handoff.pinned.extend(blocks)
        handoff.holds.extend(hold.take() for hold in sequence.holds if hold not in handoff.holds)
        return _Announcement(sequence.key, first, blocks)

    def _forget(self, handoff: _Handoff) -> None:
        FAILPOINTS.hit("prefill.free.before")
        del self._handoffs[handoff.work.key]
        self._publish(handoff)
        self._pool.release(handoff.pinned, handoff.pin)
        handoff.pinned.clear()
        for hold in handoff.holds:
            hold.drop()
        handoff.holds.clear()
        FAILPOINTS.hit("prefill.free.after")

    def _drop_everything(self, incarnation: Incarnation | None) -> None:
        """The coordinator that gave us this work is gone or knows us no more: keep the cache, drop the rest."""
        for key in tuple(self._handoffs):
            self._end(key, Stale("this node has joined anew"), tell=False)
        if incarnation is not None:
            self._report.incarnation = incarnation


def _report_to_pb(handoff: _Handoff, report: OutboundReport) -> HandoffReport:
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
