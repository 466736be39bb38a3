"""The memory-bound role. The life of an attempt here:

    Submit with a writer -> match what is cached, reserve the rest, grant a Ticket: Reserved, or Refused at once
        Started          -> the writer has begun
        Sealed           -> everything landed, checked, and the writer fenced off: Commit; the first token is shown
        Lost             -> blocks return, or stay QUARANTINED until Fenced; AttemptFailed
    Submit without one, or a prefix that lacks only its last token -> this node computes what is missing itself
    running              -> one Tokens message a step for all sequences, until it is finished, preempted or cancelled

Nothing of a ticket is looked at before its Commit. Every block of a ticket leaves RESERVED, WRITING or QUARANTINED by
one of the plane's events, and by nothing else.

What the shared pool has counts as held here: it is not sent. Full blocks are published as they fill.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from baton.block_hash import BlockHash, root_hash
from baton.errors import BatonError, Cancelled, Incomplete, NodeFailed, NodeGone, Stale, TooLong
from baton.failpoints import FAILPOINTS
from baton.pool_terms import PoolHit
from baton.types import (
    AttemptKey,
    Incarnation,
    PeerAddress,
    SegmentRef,
    Ticket,
    TicketId,
    TokenEvent,
    TokenScore,
    Work,
    mint_id,
)
from kv_transfer.plane import Fenced, InboundPlane, Lost, Sealed, SealInfo, Started
from node_engine.core.messages import Cancel, Command, CoordinatorLost, Joined, PeerGone, Submit
from node_engine.core.outcome import Dropped, Emitted, Failed, Outcome, PrefillCompleted, PromptScored
from node_engine.core.pooled import Pooled
from node_engine.core.residency import Refusal
from node_engine.core.sequence import Sequence
from node_engine.core.step import StepBatch
from node_engine.role import NodeParts, check_work, refuse_too_long


@dataclass(slots=True, eq=False)
class _Arrival:
    """A ticket of ours whose hand-off has neither committed nor been given up by the plane."""

    work: Work
    held_tokens: int
    pooled_tokens: int  # of these, what the shared pool has
    remote_tokens: int  # of these, what another host's has sent
    over: bool = False  # the coordinator knows, or wanted it so


class DecodeRole:
    def __init__(self, parts: NodeParts, plane: InboundPlane) -> None:
        self._parts = parts
        self._plane = plane
        self._scheduler = parts.scheduler
        self._pool = parts.pool
        self._report = parts.report
        self._sharing = parts.sharing
        self._layout = parts.engine.layout
        self._arrivals: dict[TicketId, _Arrival] = {}
        self._tickets: dict[AttemptKey, TicketId] = {}
        # Computed here and not yet reported as Admitted: their share, in seconds, of the steps that they took part in.
        self._local: dict[AttemptKey, float] = {}
        self._step: list[tuple[AttemptKey, int]] = []  # how many tokens the step in progress computes for whom of them

    @property
    def transfer_endpoint(self) -> str:
        return self._plane.endpoint

    @property
    def holding(self) -> int:
        return len(self._arrivals) + len(self._scheduler.sequences())

    def counters(self) -> dict[str, float]:
        return {f"baton_transfer_{name}_total": value for name, value in self._plane.counters().items()}

    def close(self) -> None:
        self._plane.close()

    def preview(self, command: Command) -> None:
        """Nothing here need overtake the step in progress."""

    def handle(self, item: Command | object) -> None:
        match item:
            case Joined(incarnation):
                self._drop_everything(incarnation)
            case CoordinatorLost():
                self._drop_everything(None)
            case Submit(work, writer, prefill_share, hit):
                self._scheduler.allowance.share = prefill_share or None
                self._submit(work, writer, hit)
            case Cancel(key, reason):
                self._cancel(key, reason)
            case PeerGone(incarnation):
                self._plane.peer_gone(incarnation)
            case Started(ticket):
                if ticket in self._arrivals:
                    self._pool.mark_writing(ticket)
            case Sealed(ticket, seal, _):
                self._sealed(ticket, seal)
            case Lost(ticket, error, fenced):
                self._lost(ticket, error, fenced)
            case Fenced(ticket):
                self._pool.fenced(ticket)
            case _:
                raise TypeError(f"a decode node got {item!r}")

    def before_step(self, batch: StepBatch) -> None:
        """Note how much of the step belongs to prompts that are computed here. Nobody waits for layers."""
        self._step.clear()
        if self._local:
            pieces = ((self._scheduler.computing(piece.sequence).key, len(piece.tokens)) for piece in batch.slices)
            self._step += [(key, tokens) for key, tokens in pieces if key in self._local]

    def after_step(self, batch: StepBatch, outcomes: Iterable[Outcome], seconds: float) -> None:
        for key, tokens in self._step:
            if key in self._local:
                self._local[key] += seconds * self._scheduler.allowance.share_of(batch, tokens)
        self.deliver(outcomes)

    def deliver(self, outcomes: Iterable[Outcome]) -> None:
        tokens: list[TokenEvent] = []
        for outcome in outcomes:
            match outcome:
                case PromptScored(sequence, first, scores):
                    self._report.prompt_scores(sequence.key, first, scores)
                case Emitted(sequence, event):
                    if sequence.key in self._local:
                        self._admitted_locally(sequence)
                        self._sharing.publish(sequence, paced=True)
                    tokens.append(event)
                    self._sharing.filled(sequence)
                case Failed(sequence, error, caused_by):
                    self._local.pop(sequence.key, None)
                    self._report.failed(sequence.key, error, caused_by)
                case Dropped(sequence) | PrefillCompleted(sequence):
                    raise TypeError(f"{sequence.key} is handing off on a decode node")
        if tokens:
            self._report.tokens(tokens)

    def step_failed(self, batch: StepBatch, error: Exception) -> None:
        reason = error if isinstance(error, BatonError) else NodeFailed(f"{type(error).__name__} in the forward pass")
        failed = [self._scheduler.computing(piece.sequence).key for piece in batch.slices]
        self._scheduler.abandon(batch)
        for key in failed:
            self._cancel(key, reason)
            self._report.failed(key, reason)

    # the life of one attempt

    def _submit(self, work: Work, writer: PeerAddress | None, hit: PoolHit | None) -> None:
        pooled = self._sharing.pooled(hit)
        if self._scheduler.get(work.key) is None:  # else the message came twice
            self._begin(work, writer, pooled)
        if pooled is not None:
            pooled.done()

    def _begin(self, work: Work, writer: PeerAddress | None, pooled: Pooled | None) -> None:
        engine = self._parts.engine
        try:
            FAILPOINTS.hit("decode.allocate.before")
            check_work(work, engine)
            root = root_hash(engine.model_digest, self._layout, work.request.cache_salt)
            survey = self._scheduler.survey(work, root, pooled)
            if writer is None or survey.lacking == 1:
                self._compute_here(work, root, pooled, survey.refusal, announce=writer is not None)
            else:
                self._reserve(work, root, pooled, writer)
            FAILPOINTS.hit("decode.allocate.after")
        except TooLong as error:
            self._cancel(work.key, error)
            refuse_too_long(work, self._pool, self._report)
        except BatonError as error:
            self._cancel(work.key, error)
            self._report.failed(work.key, error)

    def _compute_here(
        self, work: Work, root: BlockHash, pooled: Pooled | None, refusal: Refusal | None, *, announce: bool
    ) -> None:
        """Colocated, or all but the last token is here already: then the prefill leg is not needed."""
        if refusal is not None:
            self._report.refused(work.key, refusal.needed_blocks, refusal.free_blocks)
            return
        self._scheduler.add(work, root, pooled=pooled)
        self._local[work.key] = 0.0
        if announce:
            self._report.reserved(work.key, None, len(work.context) - 1)

    def _reserve(self, work: Work, root: BlockHash, pooled: Pooled | None, writer: PeerAddress) -> None:
        ticket_id = TicketId(mint_id())
        found = self._scheduler.expect(work, root, ticket_id, pooled)
        if isinstance(found, Refusal):
            self._report.refused(work.key, found.needed_blocks, found.free_blocks)
            return
        ticket = self._ticket(ticket_id, found, writer)
        held = found.num_computed
        self._arrivals[ticket_id] = _Arrival(work, held, found.num_pooled, found.num_remote)
        self._tickets[work.key] = ticket_id
        self._plane.grant(ticket)
        self._report.reserved(work.key, ticket, held)

    def _ticket(self, ticket_id: TicketId, sequence: Sequence, writer: PeerAddress) -> Ticket:
        incarnation = self._report.incarnation
        me = PeerAddress(self._parts.name, incarnation, self._parts.host_id, self._plane.endpoint)
        return Ticket(
            id=ticket_id,
            key=sequence.key,
            decode=me,
            writer=writer.incarnation,
            first_block=len(sequence.block_table),
            offsets=tuple(block * self._layout.block_bytes for block in sequence.promised),
            num_tokens=sequence.context_len,
            ttl=self._parts.config.ticket_ttl,
            transport=self._plane.choose_transport(writer.host_id),
            segment=SegmentRef(self._parts.arena.name, incarnation),
            fence=self._plane.mint_fence(),
        )

    def _sealed(self, ticket: TicketId, seal: SealInfo) -> None:
        arrival = self._arrivals.get(ticket)
        if arrival is None or arrival.over:  # revoked while the event was under way: Lost follows
            return
        work, key = arrival.work, arrival.work.key
        try:
            FAILPOINTS.hit("decode.commit.before")
            token = self._first_token(work, seal)
        except BatonError as error:
            self._plane.revoke(ticket, error)
            return
        outcomes = self._scheduler.adopt(key, (token,), seal.score)
        self._plane.commit(ticket)
        FAILPOINTS.hit("decode.commit.after")
        del self._arrivals[ticket], self._tickets[key]
        received = len(work.context) - arrival.held_tokens
        self._report.admitted(
            key,
            computed=0,
            cached=arrival.held_tokens,
            received=received,
            pooled=arrival.pooled_tokens,
            remote=arrival.remote_tokens,
        )
        FAILPOINTS.hit("decode.first_token.before")
        self.deliver(outcomes)
        FAILPOINTS.hit("decode.first_token.after")

    def _first_token(self, work: Work, seal: SealInfo) -> int:
        """The token that prefill drew. Raises Incomplete unless the seal continues this attempt by exactly one, scored
        as the request asks."""
        *before, token = seal.emitted or (-1,)
        if tuple(before) != work.emitted or not 0 <= token < self._parts.engine.vocab_size:
            raise Incomplete(f"the seal of {work.key} carries {len(seal.emitted)} tokens after {len(work.emitted)}")
        if not _is_due(seal.score, work.request.sampling.logprobs, self._parts.engine.vocab_size):
            raise Incomplete(f"the score in the seal of {work.key} is not what logprobs asks for")
        return token

    def _lost(self, ticket: TicketId, error: BatonError, fenced: bool) -> None:
        arrival = self._arrivals.pop(ticket)
        key = arrival.work.key
        del self._tickets[key]
        FAILPOINTS.hit("decode.free.before")
        self._scheduler.cancel(key)
        if fenced:
            self._pool.release_ticket(ticket)
        else:
            self._pool.quarantine(ticket)
        FAILPOINTS.hit("decode.free.after")
        if not arrival.over and not isinstance(error, Cancelled):  # whoever cancelled it has its own word to say
            self._report.failed(key, error)

    def _cancel(self, key: AttemptKey, reason: BatonError) -> None:
        self._local.pop(key, None)
        self._scheduler.cancel(key)
        ticket = self._tickets.get(key)
        if ticket is not None:
            self._arrivals[ticket].over = True
            self._plane.revoke(ticket, reason)

    def _admitted_locally(self, sequence: Sequence) -> None:
        share, cached = self._local.pop(sequence.key), sequence.num_cached
        computed = sequence.context_len - cached
        self._report.admitted(
            sequence.key,
            computed=computed,
            cached=cached,
            received=0,
            pooled=sequence.num_pooled,
            remote=sequence.num_remote,
            share=share,
        )

    def _drop_everything(self, incarnation: Incarnation | None) -> None:
        """The coordinator that gave us this work is gone or knows us no more: keep the cache, drop the rest."""
        reason = Stale("this node has joined anew") if incarnation else NodeGone("this node has no coordinator")
        for sequence in self._scheduler.sequences():
            self._cancel(sequence.key, reason)
        for key in tuple(self._tickets):
            self._cancel(key, reason)
        if incarnation is not None:
            self._report.incarnation = incarnation
            self._plane.rejoin(incarnation)


def _is_due(score: TokenScore | None, wanted: int | None, vocab_size: int) -> bool:
    """Whether `score` is what `logprobs=wanted` asks for, and one that a model can give."""
    if score is None or wanted is None:
        return score is None and wanted is None
    logprobs = (score.logprob, *(logprob for _, logprob in score.top))
    return (
        len(score.top) == min(wanted, vocab_size)
        and all(0 <= token < vocab_size for token, _ in score.top)
        and all(math.isfinite(logprob) and logprob <= 0.0 for logprob in logprobs)
    )
