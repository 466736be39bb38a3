"""The decode role: receives KV from prefill nodes, or computes it, and decodes. An attempt's life:

    DecodeOrder with a KV writer   -> match the cached prefix, reserve blocks for the rest, grant a
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
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from baton.cluster_link.messages import (
    DecodeOrder,
    PeerLostNotice,
    PrefillOrder,
)
from baton.cluster_link.report_types import VerifiedDraft
from baton.errors import BatonError, Cancelled, IncompleteTransfer, NodeLost
from baton.kv.blocks import BlockHash
from baton.process.failpoints import failpoint
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
    CUDA_IPC,
    InboundFenced,
    InboundLost,
    InboundPlane,
    InboundSealed,
    InboundStarted,
    SealInfo,
)
from node_engine.core.blocks.pool_prefix import PoolPrefix
from node_engine.core.scheduling.capacity import CapacityRefusal
from node_engine.core.sequences.outcomes import (
    DraftsVerified,
    PrefillCompleted,
    PrefillRequeued,
    PromptLogprobsComputed,
    SequenceFailed,
    SequenceOutcome,
    TokenEmitted,
)
from node_engine.core.sequences.sequence import Sequence, SequenceState
from node_engine.core.sequences.token_constraint import TokenConstraint
from node_engine.core.step.step_batch import SequenceId, StepBatch
from node_engine.roles.base_role import BaseRole
from node_engine.roles.role_policy import RoleContext


@dataclass(slots=True, eq=False)
class _PendingHandoff:
    """A ticket of this node whose hand-off has neither committed nor failed."""

    work: AttemptSpec
    held_tokens: int  # context tokens that need not be sent
    pool_tokens: int  # of these, found in the shared pool
    remote_pool_tokens: int  # of these, sent by another host's pool
    is_on_device: bool  # what lands is in the memory that the engine computes in
    is_over: bool = False  # its end is reported, or the coordinator has ended it


class DecodeRole(BaseRole):
    """A RolePolicy that decodes attempts; see the module."""

    def __init__(self, context: RoleContext, plane: InboundPlane) -> None:
        super().__init__(context, plane)
        self._plane = plane
        self._pending_handoffs: dict[TicketId, _PendingHandoff] = {}
        self._tickets: dict[AttemptKey, TicketId] = {}
        # Prefills that are computed here and not yet reported as Admitted: their share, in seconds,
        # of the steps that they took part in.
        self._local_prefill_seconds: dict[AttemptKey, float] = {}
        # Of these, tokens in the step in progress.
        self._local_step_keys: dict[SequenceId, AttemptKey] = {}

    @property
    def num_held_attempts(self) -> int:
        return len(self._pending_handoffs) + len(self._scheduler.sequences)

    def _handle_event(self, item: object) -> None:
        match item:
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

    def _on_joined(self, incarnation: Incarnation) -> None:
        self._plane.rejoin(incarnation)

    def before_step(self, batch: StepBatch) -> None:
        """Record the local prefills of the step; no layer callback is needed."""
        self._local_step_keys.clear()
        if self._local_prefill_seconds:
            for slice_ in batch.slices:
                key = self._scheduler.sequences_in_flight[slice_.sequence_id].key
                if key in self._local_prefill_seconds:
                    self._local_step_keys[slice_.sequence_id] = key

    def after_step(
        self, batch: StepBatch, outcomes: Iterable[SequenceOutcome], seconds: float
    ) -> None:
        budget = self._scheduler.prefill_budget
        for slice_ in batch.slices if self._local_step_keys else ():
            key = self._local_step_keys.get(slice_.sequence_id)
            if key is not None and key in self._local_prefill_seconds:
                share = budget.compute_time_share(batch, len(slice_.token_ids))
                self._local_prefill_seconds[key] += seconds * share
        self.deliver_outcomes(outcomes)

    def deliver_outcomes(self, outcomes: Iterable[SequenceOutcome]) -> None:
        tokens: list[TokenEvent] = []
        drafts: list[VerifiedDraft] = []
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
                case DraftsVerified(sequence, result):
                    drafts.append(
                        VerifiedDraft(sequence.key, result.num_drafted, result.num_accepted)
                    )
                case SequenceFailed(sequence, error, caused_by):
                    self._local_prefill_seconds.pop(sequence.key, None)
                    self._reporter.report_failed(sequence.key, error, caused_by)
                case PrefillRequeued(sequence) | PrefillCompleted(sequence):
                    raise TypeError(f"{sequence.key} is handing off on a decode node")
        if tokens:
            self._reporter.report_tokens(tokens, drafts)

    # the life of one attempt

    def _start_attempt(
        self, order: PrefillOrder | DecodeOrder, pool_prefix: PoolPrefix | None
    ) -> None:
        if not isinstance(order, DecodeOrder):
            raise TypeError(f"a decode node cannot handle {order!r}")
        self._scheduler.prefill_budget.prefill_step_share = order.prefill_step_share or None
        self._reserve_or_prefill(order.work, order.kv_writer, pool_prefix)

    @failpoint("decode.allocate")
    def _reserve_or_prefill(
        self, work: AttemptSpec, writer: PeerAddress | None, pool_prefix: PoolPrefix | None
    ) -> None:
        self._check_work(work)
        constraint = self._context.constraints.take_constraint(work)
        root = self._compute_root_hash(work)
        estimate = self._scheduler.estimate_admission(work, root, pool_prefix)
        if writer is None or estimate.num_missing_tokens == 1:
            announce = writer is not None
            self._prefill_locally(
                work, root, pool_prefix, constraint, estimate.refusal, announce=announce
            )
        else:
            self._reserve_for_handoff(work, root, pool_prefix, constraint, writer)

    def _prefill_locally(
        self,
        work: AttemptSpec,
        root: BlockHash,
        pool_prefix: PoolPrefix | None,
        constraint: TokenConstraint | None,
        refusal: CapacityRefusal | None,
        *,
        announce: bool,
    ) -> None:
        """Compute the context here; `announce` tells the coordinator that prefill is not needed."""
        if refusal is not None:
            self._reporter.report_refused(work.key, refusal.needed_blocks, refusal.free_blocks)
            return
        self._scheduler.add_sequence(work, root, pool_prefix=pool_prefix, constraint=constraint)
        self._local_prefill_seconds[work.key] = 0.0
        if announce:
            self._reporter.report_reserved(work.key, None, len(work.context_token_ids) - 1)

    def _reserve_for_handoff(
        self,
        work: AttemptSpec,
        root: BlockHash,
        pool_prefix: PoolPrefix | None,
        constraint: TokenConstraint | None,
        writer: PeerAddress,
    ) -> None:
        ticket_id = TicketId(mint_id())
        result = self._scheduler.reserve_for_handoff(work, root, ticket_id, pool_prefix, constraint)
        if isinstance(result, CapacityRefusal):
            self._reporter.report_refused(work.key, result.needed_blocks, result.free_blocks)
            return
        ticket = self._build_ticket(ticket_id, result, writer)
        held_tokens = result.num_computed_tokens
        self._pending_handoffs[ticket_id] = _PendingHandoff(
            work,
            held_tokens,
            result.pool_use.num_tokens,
            result.pool_use.num_remote_tokens,
            ticket.transport == CUDA_IPC,
        )
        self._tickets[work.key] = ticket_id
        self._plane.grant_ticket(ticket)
        self._reporter.report_reserved(work.key, ticket, held_tokens)

    def _build_ticket(self, ticket_id: TicketId, sequence: Sequence, writer: PeerAddress) -> Ticket:
        incarnation, block_bytes = self._reporter.incarnation, self._layout.block_bytes
        own_address = PeerAddress(
            self._context.name, incarnation, self._context.host_id, self._plane.endpoint
        )
        return Ticket(
            id=ticket_id,
            key=sequence.key,
            decode_peer=own_address,
            writer_incarnation=writer.incarnation,
            first_block=len(sequence.block_table),
            block_offsets=tuple(block * block_bytes for block in sequence.reserved_blocks),
            num_tokens=sequence.context_len,
            ttl_seconds=self._context.config.ticket_ttl,
            transport=self._plane.choose_transport(writer.host_id, writer.transfer_endpoint),
            segment=SegmentRef(self._context.arena.name, incarnation),
            fence_byte=self._plane.allocate_fence_byte(),
        )

    def _on_sealed(self, ticket: TicketId, seal: SealInfo) -> None:
        pending = self._pending_handoffs.get(ticket)
        if pending is None or pending.is_over:  # revoked in the meantime: InboundLost follows
            return
        work, key = pending.work, pending.work.key
        try:
            with failpoint("decode.commit"):
                token = self._check_first_token(work, seal)
                sequence = self._scheduler.sequences.require_sequence(
                    key, SequenceState.AWAITING_KV
                )
                if not pending.is_on_device:
                    self._context.engine.load_blocks(sequence.reserved_blocks)
                outcomes = self._scheduler.commit_handoff(key, (token,), seal.last_token_score)
                self._plane.commit_ticket(ticket)
        except BatonError as error:
            self._plane.revoke_ticket(ticket, error)
            return
        del self._pending_handoffs[ticket], self._tickets[key]
        self._reporter.report_admitted(
            key,
            computed_tokens=0,
            cached_tokens=pending.held_tokens,
            received_tokens=len(work.context_token_ids) - pending.held_tokens,
            pool_tokens=pending.pool_tokens,
            remote_pool_tokens=pending.remote_pool_tokens,
        )
        with failpoint("decode.first_token"):
            self.deliver_outcomes(outcomes)

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
        pending = self._pending_handoffs.pop(ticket)
        key = pending.work.key
        del self._tickets[key]
        with failpoint("decode.free"):
            self._scheduler.cancel_sequence(key)
            if fenced:
                self._block_pool.reservations.release_ticket(ticket)
            else:
                self._block_pool.reservations.quarantine_ticket(ticket)
        if not pending.is_over and not isinstance(error, Cancelled):  # the canceller reports it
            self._reporter.report_failed(key, error)

    def _end_attempt(self, key: AttemptKey, error: BatonError, *, report: bool) -> None:
        self._local_prefill_seconds.pop(key, None)
        self._scheduler.cancel_sequence(key)
        ticket = self._tickets.get(key)
        if ticket is not None:
            self._pending_handoffs[ticket].is_over = True
            self._plane.revoke_ticket(ticket, error)
        if report:
            self._reporter.report_failed(key, error)

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

    def _is_known(self, key: AttemptKey) -> bool:
        return self._scheduler.sequences.get(key) is not None

    def _list_attempts(self) -> Collection[AttemptKey]:
        return (*(sequence.key for sequence in self._scheduler.sequences), *self._tickets)

    def _coordinator_lost_error(self) -> BatonError:
        return NodeLost("this node has no coordinator")


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
