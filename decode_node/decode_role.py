"""The decode role: receives KV from prefill nodes, or computes it, and decodes. An attempt's life:

    DecodeOrder with a KV writer -> match the cached prefix, reserve blocks for the rest, grant a
                                      ticket and report Reserved; or report Refused at once
        InboundStarted             -> the KV writer has begun
        InboundSealed              -> all KV landed and verified, the writer fenced off: commit,
                                      report Admitted and the first token
        InboundLost                -> blocks freed, or QUARANTINED until InboundFenced;
                                      AttemptFailed reported
    DecodeOrder without a writer, or only the last token is not cached -> compute it here
    running                        -> one Tokens message per step for all sequences, until the
                                      attempt is finished, preempted or cancelled

Blocks of a ticket are not read before its commit. They leave RESERVED, WRITING and QUARANTINED only
by an event of the plane.

What the shared pool has of a context is not sent by prefill. Full blocks are published as they
fill.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from baton.cluster_link.messages import CancelOrder, DecodeOrder, PeerLostNotice
from baton.errors import (
    BatonError,
    Cancelled,
    ContextLengthExceeded,
    IncompleteTransfer,
    NodeFailed,
    NodeLost,
    StaleMessage,
)
from baton.kv.block_hash import BlockHash, root_hash
from baton.kv.pool_types import PoolHit
from baton.process.failpoints import FAILPOINTS
from baton.types import (
    AttemptKey,
    AttemptSpec,
    Incarnation,
    PeerAddress,
    SegmentRef,
    Ticket,
    TicketId,
    TokenEvent,
    TokenLogprobs,
    mint_id,
)
from kv_transfer.plane import (
    InboundFenced,
    InboundLost,
    InboundPlane,
    InboundSealed,
    InboundStarted,
    SealInfo,
)
from node_engine.core.blocks.pool_prefix import PoolPrefix
from node_engine.core.node_commands import (
    CoordinatorLost,
    NodeCommand,
    NodeJoined,
    OrderWithPoolHit,
)
from node_engine.core.scheduling.capacity import CapacityRefusal
from node_engine.core.sequences.outcomes import (
    PrefillCompleted,
    PrefillRequeued,
    PromptLogprobsComputed,
    SequenceFailed,
    SequenceOutcome,
    TokenEmitted,
)
from node_engine.core.sequences.sequence import Sequence
from node_engine.core.step.step_batch import StepBatch
from node_engine.roles.role_policy import RoleContext, check_work, report_too_long


@dataclass(slots=True, eq=False)
class _PendingHandoff:
    """A ticket of this node whose hand-off has neither committed nor failed."""

    work: AttemptSpec
    held_tokens: int  # context tokens that need not be sent
    pool_tokens: int  # of these, found in the shared pool
    remote_pool_tokens: int  # of these, sent by another host's pool
    is_over: bool = False  # its end is reported, or the coordinator has ended it


class DecodeRole:
    """A RolePolicy that decodes attempts; see the module."""

    def __init__(self, context: RoleContext, plane: InboundPlane) -> None:
        self._context = context
        self._plane = plane
        self._scheduler = context.scheduler
        self._block_pool = context.block_pool
        self._reporter = context.reporter
        self._pool_connector = context.pool_connector
        self._layout = context.engine.layout
        self._pending_handoffs: dict[TicketId, _PendingHandoff] = {}
        self._tickets: dict[AttemptKey, TicketId] = {}
        # Prefills that are computed here and not yet reported as Admitted: their share, in seconds,
        # of the steps that they took part in.
        self._local_prefill_seconds: dict[AttemptKey, float] = {}
        # Of these, tokens in the step in progress.
        self._local_step_tokens: list[tuple[AttemptKey, int]] = []

    @property
    def transfer_endpoint(self) -> str:
        return self._plane.endpoint

    @property
    def num_held_attempts(self) -> int:
        return len(self._pending_handoffs) + len(self._scheduler.sequences)

    def counters(self) -> dict[str, float]:
        return {
            f"baton_transfer_{name}_total": value for name, value in self._plane.counters().items()
        }

    def close(self) -> None:
        self._plane.close()

    def preview_command(self, command: NodeCommand) -> None:
        """No command is urgent: all of them wait for the step in progress."""

    def handle_item(self, item: NodeCommand | object) -> None:
        match item:
            case NodeJoined(incarnation):
                self._drop_all_attempts(incarnation)
            case CoordinatorLost():
                self._drop_all_attempts(None)
            case DecodeOrder():
                self._on_decode_order(item, None)
            case OrderWithPoolHit(DecodeOrder() as order, hit):
                self._on_decode_order(order, hit)
            case CancelOrder(key, reason):
                self._cancel_attempt(key, reason)
            case PeerLostNotice(incarnation):
                self._plane.on_peer_gone(incarnation)
            case InboundStarted(ticket):
                if ticket in self._pending_handoffs:
                    self._block_pool.reservations.mark_writing(ticket)
            case InboundSealed(ticket, seal, _):
                self._on_sealed(ticket, seal)
            case InboundLost(ticket, error, fenced):
                self._on_lost(ticket, error, fenced)
            case InboundFenced(ticket):
                self._block_pool.reservations.free_quarantined_ticket(ticket)
            case _:
                raise TypeError(f"a decode node cannot handle {item!r}")

    def before_step(self, batch: StepBatch) -> None:
        """Record the tokens of local prefills in the step; no layer callback is needed."""
        self._local_step_tokens.clear()
        if self._local_prefill_seconds:
            for slice_ in batch.slices:
                key = self._scheduler.sequences_in_flight[slice_.sequence_id].key
                if key in self._local_prefill_seconds:
                    self._local_step_tokens.append((key, len(slice_.token_ids)))

    def after_step(
        self, batch: StepBatch, outcomes: Iterable[SequenceOutcome], seconds: float
    ) -> None:
        for key, tokens in self._local_step_tokens:
            if key in self._local_prefill_seconds:
                self._local_prefill_seconds[key] += (
                    seconds * self._scheduler.prefill_budget.compute_time_share(batch, tokens)
                )
        self.deliver_outcomes(outcomes)

    def deliver_outcomes(self, outcomes: Iterable[SequenceOutcome]) -> None:
        tokens: list[TokenEvent] = []
        for outcome in outcomes:
            match outcome:
                case PromptLogprobsComputed(sequence, first, scores):
                    self._reporter.report_prompt_logprobs(sequence.key, first, scores)
                case TokenEmitted(sequence, event):
                    if sequence.key in self._local_prefill_seconds:
                        self._report_local_admission(sequence)
                        self._pool_connector.publish_sequence(sequence, is_rate_limited=True)
                    tokens.append(event)
                    self._pool_connector.publish_filled_blocks(sequence)
                case SequenceFailed(sequence, error, caused_by):
                    self._local_prefill_seconds.pop(sequence.key, None)
                    self._reporter.report_failed(sequence.key, error, caused_by)
                case PrefillRequeued(sequence) | PrefillCompleted(sequence):
                    raise TypeError(f"{sequence.key} is handing off on a decode node")
        if tokens:
            self._reporter.report_tokens(tokens)

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
            self._cancel_attempt(key, reason)
            self._reporter.report_failed(key, reason)

    # the life of one attempt

    def _on_decode_order(self, order: DecodeOrder, hit: PoolHit | None) -> None:
        self._scheduler.prefill_budget.prefill_step_share = order.prefill_step_share or None
        pool_prefix = self._pool_connector.build_pool_prefix(hit)
        if self._scheduler.sequences.get(order.work.key) is None:  # else the order is a duplicate
            self._begin_attempt(order.work, order.kv_writer, pool_prefix)
        if pool_prefix is not None:
            pool_prefix.release()

    def _begin_attempt(
        self, work: AttemptSpec, writer: PeerAddress | None, pool_prefix: PoolPrefix | None
    ) -> None:
        engine = self._context.engine
        try:
            FAILPOINTS.hit("decode.allocate.before")
            check_work(work, engine)
            root = root_hash(engine.model_digest, self._layout, work.request.cache_salt)
            estimate = self._scheduler.estimate_admission(work, root, pool_prefix)
            if writer is None or estimate.num_missing_tokens == 1:
                self._prefill_locally(
                    work, root, pool_prefix, estimate.refusal, announce=writer is not None
                )
            else:
                self._reserve_for_handoff(work, root, pool_prefix, writer)
            FAILPOINTS.hit("decode.allocate.after")
        except ContextLengthExceeded as error:
            self._cancel_attempt(work.key, error)
            report_too_long(work, self._block_pool, self._reporter)
        except BatonError as error:
            self._cancel_attempt(work.key, error)
            self._reporter.report_failed(work.key, error)

    def _prefill_locally(
        self,
        work: AttemptSpec,
        root: BlockHash,
        pool_prefix: PoolPrefix | None,
        refusal: CapacityRefusal | None,
        *,
        announce: bool,
    ) -> None:
        """Compute the context here; `announce` tells the coordinator that prefill is not needed."""
        if refusal is not None:
            self._reporter.report_refused(work.key, refusal.needed_blocks, refusal.free_blocks)
            return
        self._scheduler.add_sequence(work, root, pool_prefix=pool_prefix)
        self._local_prefill_seconds[work.key] = 0.0
        if announce:
            self._reporter.report_reserved(work.key, None, len(work.context_token_ids) - 1)

    def _reserve_for_handoff(
        self,
        work: AttemptSpec,
        root: BlockHash,
        pool_prefix: PoolPrefix | None,
        writer: PeerAddress,
    ) -> None:
        ticket_id = TicketId(mint_id())
        result = self._scheduler.reserve_for_handoff(work, root, ticket_id, pool_prefix)
        if isinstance(result, CapacityRefusal):
            self._reporter.report_refused(work.key, result.needed_blocks, result.free_blocks)
            return
        ticket = self._build_ticket(ticket_id, result, writer)
        held_tokens = result.num_computed_tokens
        self._pending_handoffs[ticket_id] = _PendingHandoff(
            work, held_tokens, result.pool_use.num_tokens, result.pool_use.num_remote_tokens
        )
        self._tickets[work.key] = ticket_id
        self._plane.grant_ticket(ticket)
        self._reporter.report_reserved(work.key, ticket, held_tokens)

    def _build_ticket(self, ticket_id: TicketId, sequence: Sequence, writer: PeerAddress) -> Ticket:
        incarnation = self._reporter.incarnation
        own_address = PeerAddress(
            self._context.name, incarnation, self._context.host_id, self._plane.endpoint
        )
        return Ticket(
            id=ticket_id,
            key=sequence.key,
            decode_peer=own_address,
            writer_incarnation=writer.incarnation,
            first_block=len(sequence.block_table),
            block_offsets=tuple(
                block * self._layout.block_bytes for block in sequence.reserved_blocks
            ),
            num_tokens=sequence.context_len,
            ttl_seconds=self._context.config.ticket_ttl,
            transport=self._plane.choose_transport(writer.host_id),
            segment=SegmentRef(self._context.arena.name, incarnation),
            fence_byte=self._plane.allocate_fence_byte(),
        )

    def _on_sealed(self, ticket: TicketId, seal: SealInfo) -> None:
        arrival = self._pending_handoffs.get(ticket)
        if arrival is None or arrival.is_over:  # revoked in the meantime: InboundLost follows
            return
        work, key = arrival.work, arrival.work.key
        try:
            FAILPOINTS.hit("decode.commit.before")
            token = self._check_first_token(work, seal)
        except BatonError as error:
            self._plane.revoke_ticket(ticket, error)
            return
        outcomes = self._scheduler.commit_handoff(key, (token,), seal.last_token_score)
        self._plane.commit_ticket(ticket)
        FAILPOINTS.hit("decode.commit.after")
        del self._pending_handoffs[ticket], self._tickets[key]
        self._reporter.report_admitted(
            key,
            computed_tokens=0,
            cached_tokens=arrival.held_tokens,
            received_tokens=len(work.context_token_ids) - arrival.held_tokens,
            pool_tokens=arrival.pool_tokens,
            remote_pool_tokens=arrival.remote_pool_tokens,
        )
        FAILPOINTS.hit("decode.first_token.before")
        self.deliver_outcomes(outcomes)
        FAILPOINTS.hit("decode.first_token.after")

    def _check_first_token(self, work: AttemptSpec, seal: SealInfo) -> int:
        """The token that prefill has sampled.

        Raises IncompleteTransfer unless the seal continues this attempt by exactly one valid token,
        with the logprobs that the request asks for.
        """
        *before, token = seal.emitted_token_ids or (-1,)
        if (
            tuple(before) != work.emitted_token_ids
            or not 0 <= token < self._context.engine.vocab_size
        ):
            raise IncompleteTransfer(
                f"the seal of {work.key} has {len(seal.emitted_token_ids)} output tokens,"
                f" expected the {len(work.emitted_token_ids)} emitted ones and a valid new one"
            )
        if not _are_valid_logprobs(
            seal.last_token_score, work.request.sampling.logprobs, self._context.engine.vocab_size
        ):
            raise IncompleteTransfer(
                f"the logprobs in the seal of {work.key} are not those that the request asks for"
            )
        return token

    def _on_lost(self, ticket: TicketId, error: BatonError, fenced: bool) -> None:
        arrival = self._pending_handoffs.pop(ticket)
        key = arrival.work.key
        del self._tickets[key]
        FAILPOINTS.hit("decode.free.before")
        self._scheduler.cancel_sequence(key)
        if fenced:
            self._block_pool.reservations.release_ticket(ticket)
        else:
            self._block_pool.reservations.quarantine_ticket(ticket)
        FAILPOINTS.hit("decode.free.after")
        if not arrival.is_over and not isinstance(error, Cancelled):  # the canceller reports it
            self._reporter.report_failed(key, error)

    def _cancel_attempt(self, key: AttemptKey, reason: BatonError) -> None:
        self._local_prefill_seconds.pop(key, None)
        self._scheduler.cancel_sequence(key)
        ticket = self._tickets.get(key)
        if ticket is not None:
            self._pending_handoffs[ticket].is_over = True
            self._plane.revoke_ticket(ticket, reason)

    def _report_local_admission(self, sequence: Sequence) -> None:
        self._reporter.report_admitted(
            sequence.key,
            computed_tokens=sequence.context_len - sequence.num_cached_tokens,
            cached_tokens=sequence.num_cached_tokens,
            received_tokens=0,
            pool_tokens=sequence.pool_use.num_tokens,
            remote_pool_tokens=sequence.pool_use.num_remote_tokens,
            share_seconds=self._local_prefill_seconds.pop(sequence.key),
        )

    def _drop_all_attempts(self, incarnation: Incarnation | None) -> None:
        """The coordinator no longer knows this work: end all attempts, keep the prefix cache."""
        reason = (
            StaleMessage("this node has joined anew")
            if incarnation
            else NodeLost("this node has no coordinator")
        )
        for sequence in self._scheduler.sequences:
            self._cancel_attempt(sequence.key, reason)
        for key in tuple(self._tickets):
            self._cancel_attempt(key, reason)
        if incarnation is not None:
            self._reporter.incarnation = incarnation
            self._plane.rejoin(incarnation)


def _are_valid_logprobs(
    score: TokenLogprobs | None, num_logprobs: int | None, vocab_size: int
) -> bool:
    """Whether `score` is possible and has the `num_logprobs` alternatives that were requested."""
    if score is None or num_logprobs is None:
        return score is None and num_logprobs is None
    logprobs = (score.logprob, *(logprob for _, logprob in score.top_logprobs))
    return (
        len(score.top_logprobs) == min(num_logprobs, vocab_size)
        and all(0 <= token < vocab_size for token, _ in score.top_logprobs)
        and all(math.isfinite(logprob) and logprob <= 0.0 for logprob in logprobs)
    )
