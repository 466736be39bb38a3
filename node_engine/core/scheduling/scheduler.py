"""One scheduler for both roles: which sequences compute what in the next step.

A step has a budget of tokens. Running sequences take one each; the rest, or what
`PrefillTokenBudget` grants of it, goes to prompts in chunks that end on block boundaries (except a
prompt's last), the firm before the speculative, higher classes first, then whoever is due first. A
prompt is due when, since its arrival, `STRETCH` times as many tokens have been computed as it has
itself: so short ones pass long ones, and none is passed for ever. The one that has been at it
longest gets a block in every step, so that a hand-off under way never stands still. All blocks of a
context are allocated at admission, so that a half-computed prompt never waits for memory; a running
sequence grows block by block.

    for ever:  plan = next_step();  computed = engine.run(plan.batch);  outcomes = update(plan.batch, computed)

Every other method may be called at any time, also between `next_step` and `update`: a sequence that
ends there takes no further part, but its blocks return in `update`, because until then the engine
may be writing them.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import count

from baton.errors import ConfigError, ContextLengthExceeded, OutOfBlocks
from baton.kv.block_hash import BlockHash
from baton.kv.hash_chain import HashChain
from baton.types import AttemptKey, AttemptSpec, BlockIndex, TicketId, TokenEvent, TokenLogprobs
from node_engine.core.blocks.block_ledger import BlockLedgerError
from node_engine.core.blocks.block_pool import BlockPool
from node_engine.core.blocks.pool_prefix import PoolPrefix, RefCountedPin
from node_engine.core.scheduling.dedup import dedup_to_shared_pool
from node_engine.core.scheduling.kv_cache_manager import CapacityRefusal, CopyBlocks, KVCacheManager
from node_engine.core.scheduling.preemption import MostBlocksFirst, PreemptionPolicy
from node_engine.core.scheduling.prefill_token_budget import PrefillTokenBudget
from node_engine.core.sequences.outcomes import (
    PrefillCompleted,
    PromptLogprobsComputed,
    ScheduledStep,
    SequenceOutcome,
    TokenEmitted,
)
from node_engine.core.sequences.sequence import Sequence, SequenceState
from node_engine.core.sequences.sequence_table import SequenceTable
from node_engine.core.sequences.stop_conditions import finish_reason, forbidden_token_ids
from node_engine.core.step.step_batch import (
    SampleSpec,
    SequenceId,
    SequenceSlice,
    SliceResult,
    StepBatch,
)

WAITING, PREFILLING, HANDING_OFF = (
    SequenceState.WAITING,
    SequenceState.PREFILLING,
    SequenceState.HANDING_OFF,
)
AWAITING_KV, RUNNING = SequenceState.AWAITING_KV, SequenceState.RUNNING
PREFILL_STRETCH = 4  # tokens of others that may go before a prompt's own, for each of these


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`max_num_seqs` bounds the sequences that compute or are about to, `max_batched_tokens` the
    tokens of a step, `max_model_len` prompt and output together."""

    max_num_seqs: int
    max_batched_tokens: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class AdmissionEstimate:
    """What serving a context here would take. `num_missing_tokens` tokens of it, at least one,
    would have to be computed or received; `refusal` says why this node cannot compute them itself
    now."""

    num_missing_tokens: int
    refusal: CapacityRefusal | None


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """Live sequences by state, and tokens of context that are still to be computed here."""

    num_sequences_by_state: dict[SequenceState, int]
    queued_tokens: int


class Scheduler:
    """Called on the compute thread only. At most one live sequence per attempt key."""

    def __init__(
        self,
        pool: BlockPool,
        limits: SchedulerLimits,
        eos_token_ids: tuple[int, ...] = (),
        victims: PreemptionPolicy | None = None,
        copy_in: CopyBlocks | None = None,
    ) -> None:
        """`copy_in`: as for Residency."""
        least = limits.max_num_seqs - 1 + pool.block_size
        if limits.max_num_seqs < 1 or limits.max_batched_tokens < least:
            raise ConfigError(
                f"max_batched_tokens is {limits.max_batched_tokens}, but max_num_seqs {limits.max_num_seqs} with"
                f" block_size {pool.block_size} needs {least}: raise --max-batched-tokens or lower --max-num-seqs"
            )
        self.block_pool = pool
        self.limits = limits
        self.prefill_budget = PrefillTokenBudget(pool.block_size)
        self._eos_token_ids = eos_token_ids
        self._arrival_counter = count()
        self._sequences = SequenceTable()
        self._cache_manager = KVCacheManager(
            pool, self._sequences, limits.max_num_seqs, victims or MostBlocksFirst(), copy_in
        )
        self._num_prefilled_tokens = (
            0  # tokens of prompts computed so far: the time by which prompts are due
        )
        self._batch_in_flight: StepBatch | None = None
        self._sequences_in_flight: dict[SequenceId, Sequence] = {}  # of the step in flight

    # what there is

    def get_sequence(self, key: AttemptKey) -> Sequence | None:
        return self._sequences.get(key)

    def list_sequences(self) -> tuple[Sequence, ...]:
        return tuple(self._sequences)

    def get_sequence_in_flight(self, sequence: SequenceId) -> Sequence:
        """The sequence of a slice of the step in flight."""
        return self._sequences_in_flight[sequence]

    @property
    def free_slots(self) -> int:
        """How many sequences `reserve_for_handoff` would still take: what a node reports as room
        for new work."""
        return self._cache_manager.unclaimed_slots

    @property
    def free_blocks(self) -> int:
        """How many blocks `reserve_for_handoff` would still give: what a node reports as room for
        new work."""
        return self._cache_manager.unclaimed_blocks

    def get_load(self) -> SchedulerLoad:
        queued = sum(
            sequence.context_len - sequence.num_computed_tokens
            for state in (WAITING, PREFILLING)
            for sequence in self._sequences.get_by_state(state).values()
        )
        return SchedulerLoad(
            {state: len(self._sequences.get_by_state(state)) for state in SequenceState}, queued
        )

    def estimate_admission(
        self, work: AttemptSpec, root: BlockHash, pooled: PoolPrefix | None = None
    ) -> AdmissionEstimate:
        """Look, and keep nothing. Raises TooLong or OutOfBlocks if the context can never fit."""
        sequence = self._create_sequence(work, root, hand_off=False)
        sequence.pool_prefix = pooled
        lacking, refusal = self._cache_manager.estimate_admission(sequence)
        return AdmissionEstimate(lacking, refusal)

    # sequences come and go

    def add_sequence(
        self,
        work: AttemptSpec,
        root: BlockHash,
        *,
        hand_off: bool = False,
        pooled: PoolPrefix | None = None,
    ) -> Sequence:
        """Compute the context of `work` here, then decode it or, with `hand_off`, stop after the
        first token. `pooled` is what the shared pool has of it.

        Raises TooLong or OutOfBlocks if it can never fit; nothing is then kept."""
        sequence = self._create_sequence(work, root, hand_off)
        sequence.pool_prefix = pooled.acquire() if pooled else None
        self._sequences.add_sequence(sequence)
        return sequence

    def reserve_for_handoff(
        self, work: AttemptSpec, root: BlockHash, ticket: TicketId, pooled: PoolPrefix | None = None
    ) -> Sequence | CapacityRefusal:
        """Another node will write the KV of `work`: match what is here and reserve the rest under
        `ticket`. The answer comes at once. Afterwards `block_table` is what was matched and
        `promised` what is to be written behind it.

        Raises TooLong or OutOfBlocks if it can never fit; nothing is then kept."""
        sequence = self._create_sequence(work, root, hand_off=False)
        sequence.pool_prefix = pooled.acquire() if pooled else None
        refusal = self._cache_manager.reserve_for_handoff(sequence, ticket)
        if refusal is not None:
            sequence.set_pool_prefix(None)
            return refusal
        self._sequences.add_sequence(sequence)
        self._sequences.change_state(sequence, AWAITING_KV)
        return sequence

    def commit_handoff(
        self, key: AttemptKey, sampled: tuple[int, ...] = (), score: TokenLogprobs | None = None
    ) -> list[SequenceOutcome]:
        """The hand-off is complete: commit its blocks and decode on. `sampled` is the first token,
        if the other node has drawn it, and `score` its score; without it the last token of the
        context is run here, as when a decode is continued."""
        sequence = self._sequences.require_sequence(key, AWAITING_KV)
        if len(sampled) > 1:
            raise BlockLedgerError(
                f"sequence {key}: {len(sampled)} tokens drawn elsewhere, at most 1 can be"
            )
        self._cache_manager.commit_handoff(sequence, sequence.context_len + len(sampled) - 1)
        self._sequences.change_state(sequence, RUNNING)
        return [self._accept_token(sequence, token, score) for token in sampled]

    def mark_ticketed(self, key: AttemptKey) -> None:
        """Somebody has promised room for this prefill: it is speculative no more."""
        sequence = self._sequences.require_sequence(key, WAITING, PREFILLING, HANDING_OFF)
        if not sequence.has_ticket:
            sequence.has_ticket, sequence.arrival_order = True, next(self._arrival_counter)

    def stop_prefill(self, key: AttemptKey) -> None:
        """Compute no more for a prefill whose blocks a sender may be reading: HANDING_OFF until
        `finish_handoff`."""
        sequence = self._sequences.require_sequence(key, WAITING, PREFILLING, HANDING_OFF)
        sequence.is_stopped = True
        if sequence.state is not HANDING_OFF:
            self._sequences.change_state(sequence, HANDING_OFF)

    def finish_handoff(self, key: AttemptKey) -> None:
        """The sender reads the blocks of this HANDING_OFF sequence no more."""
        self._cache_manager.finish_sequence(self._sequences.require_sequence(key, HANDING_OFF))

    def cancel_sequence(self, key: AttemptKey) -> bool:
        """End a sequence in whatever state it is; False if there is none. Every block that it holds
        returns; `promised` blocks are the ticket's and return when that is fenced."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._cache_manager.finish_sequence(sequence)
        return sequence is not None

    def dedup_to_shared_pool(
        self, chain: HashChain, blocks: tuple[BlockIndex, ...], hold: RefCountedPin
    ) -> int:
        """Not between `schedule_step` and `update_from_results`: the shared pool has these full
        blocks of `chain` from its beginning on. Own copies make way for them in every block table.
        Returns how many."""
        if self._batch_in_flight is not None:
            raise BlockLedgerError("block tables change between two steps only")
        return dedup_to_shared_pool(self.block_pool, self._sequences, chain, blocks, hold)

    # steps

    def schedule_step(self) -> ScheduledStep:
        """Decide the next step. If there is a batch, `update_from_results` or `abandon_step` has to
        follow."""
        if self._batch_in_flight is not None:
            raise BlockLedgerError("the step in flight has not been updated")
        growing = self._grow_running_sequences()
        chosen = [(sequence, 1) for sequence in growing]
        budget = self._prefill_tokens_allowed(growing)
        self._admit_waiting_sequences(budget)
        prefilling = sorted(
            self._sequences.get_by_state(PREFILLING).values(), key=lambda each: each.priority_key
        )
        oldest = min(
            (each for each in prefilling if each.has_started_prefill and not each.is_unticketed),
            key=lambda each: each.arrival_order,
            default=None,
        )
        for sequence in prefilling:
            oldest = None if sequence is oldest else oldest
            length = self._chunk_length(
                sequence, budget - (self.block_pool.block_size if oldest else 0)
            )
            if length:
                chosen.append((sequence, length))
                budget -= length
        outcomes = tuple(self._cache_manager.pop_outcomes())
        return ScheduledStep(self._build_batch(chosen) if chosen else None, outcomes)

    def update_from_results(
        self, batch: StepBatch, computed: SequenceOf[SliceResult]
    ) -> list[SequenceOutcome]:
        """The step has run: `computed` is what each slice gave."""
        self._require_in_flight(batch)
        outcomes: list[SequenceOutcome] = []
        for piece, made in zip(batch.slices, computed, strict=True):
            sequence = self._sequences_in_flight[piece.sequence_id]
            if sequence.state not in (PREFILLING, RUNNING):
                continue  # cancelled or stopped meanwhile
            self._num_prefilled_tokens += (
                len(piece.token_ids) if sequence.state is PREFILLING else 0
            )
            sequence.num_computed_tokens += len(piece.token_ids)
            self._cache_manager.on_copy_done(sequence)
            self._cache_manager.index_full_blocks(sequence)
            if piece.logprobs_spec is not None:
                outcomes.append(
                    PromptLogprobsComputed(sequence, piece.start + 1, made.prompt_logprobs)
                )
            if piece.sample_spec is not None:
                if made.token_id is None:
                    raise BlockLedgerError(f"sequence {sequence.key}: no token was drawn")
                outcomes.append(self._accept_token(sequence, made.token_id, made.logprobs))
        self._clear_step_in_flight()
        return outcomes

    def abandon_step(self, batch: StepBatch) -> None:
        """The step failed: nothing was computed. Its sequences are as before `schedule_step`, and
        may be tried again."""
        self._require_in_flight(batch)
        self._clear_step_in_flight()

    # the steps underneath

    def _create_sequence(self, work: AttemptSpec, root: BlockHash, hand_off: bool) -> Sequence:
        tokens = list(work.context_token_ids)
        if not tokens or self._sequences.get(work.key) is not None:
            raise BlockLedgerError(
                f"sequence {work.key} has {len(tokens)} tokens, or is here already"
            )
        if len(tokens) >= self.limits.max_model_len:
            raise ContextLengthExceeded(
                f"{work.key} has {len(tokens)} tokens, max_model_len is {self.limits.max_model_len}: raise"
                " --max-model-len or shorten the prompt"
            )
        needed = self._cache_manager.count_blocks_for(len(tokens))
        if needed > self.block_pool.num_blocks:
            raise OutOfBlocks(
                f"{work.key} needs {needed} blocks, the cache has {self.block_pool.num_blocks}: raise --kv-memory"
            )
        chain = HashChain(root, tokens, self.block_pool.block_size)
        sequence = Sequence(SequenceId(next(self._arrival_counter)), work, tokens, chain, hand_off)
        sequence.virtual_deadline = self._num_prefilled_tokens + PREFILL_STRETCH * len(tokens)
        return sequence

    def _grow_running_sequences(self) -> list[Sequence]:
        """The running sequences that have room for their next token, oldest first; others may be
        preempted for it."""
        running = self._sequences.get_by_state(RUNNING)
        ready: list[Sequence] = []
        for sequence_id in sorted(running):
            sequence = running.get(sequence_id)
            if sequence is not None and self._cache_manager.grow_sequence(sequence):
                ready.append(sequence)
        return [sequence for sequence in ready if sequence.state is RUNNING]

    def _prefill_tokens_allowed(self, growing: list[Sequence]) -> int:
        """Tokens of prompts that the step may take beside these: what is left of it, as far as
        their pace allows."""
        left = self.limits.max_batched_tokens - len(growing)
        if self.prefill_budget.prefill_step_share is None or not (
            self._sequences.get_by_state(WAITING) or self._sequences.get_by_state(PREFILLING)
        ):
            return left
        resident = sum(len(sequence.token_ids) for sequence in growing)
        before = max(
            (
                each.num_computed_tokens
                for each in self._sequences.get_by_state(PREFILLING).values()
            ),
            default=0,
        )
        allowed = self.prefill_budget.compute_token_limit(len(growing), resident, before)
        return left if allowed is None else min(left, allowed)

    def _admit_waiting_sequences(self, budget: int) -> None:
        """Admit waiting sequences in order, as long as the work before the next one leaves it a
        share of the step."""
        waiting, prefilling = (
            self._sequences.get_by_state(WAITING),
            self._sequences.get_by_state(PREFILLING),
        )
        while waiting and self._cache_manager.free_slots:
            head = min(waiting.values(), key=lambda each: each.priority_key)
            ahead = (each for each in prefilling.values() if each.priority_key < head.priority_key)
            left = budget - sum(each.context_len - each.num_computed_tokens for each in ahead)
            if left < min(
                self.block_pool.block_size, head.context_len
            ) or not self._cache_manager.admit_sequence(head):
                return

    def _chunk_length(self, sequence: Sequence, budget: int) -> int:
        """Tokens of a prompt that fit the budget: all that are left, or up to a block boundary."""
        start, end = sequence.num_computed_tokens, sequence.context_len
        if end - start > budget:
            end = (start + budget) // self.block_pool.block_size * self.block_pool.block_size
        return max(0, end - start)

    def _build_batch(self, chosen: list[tuple[Sequence, int]]) -> StepBatch:
        copies = tuple(
            sequence.pending_copy for sequence, _ in chosen if sequence.pending_copy is not None
        )
        batch = StepBatch(
            tuple(self._build_slice(sequence, length) for sequence, length in chosen), copies
        )
        self._batch_in_flight = batch
        self._sequences_in_flight = {sequence.id: sequence for sequence, _ in chosen}
        self._cache_manager.on_step_begin(frozenset(self._sequences_in_flight))
        return batch

    def _build_slice(self, sequence: Sequence, length: int) -> SequenceSlice:
        start = sequence.num_computed_tokens
        end = start + length
        sample = None
        if end == len(sequence.token_ids):
            params = sequence.work.request.sampling
            forbidden = forbidden_token_ids(params, self._eos_token_ids, sequence.num_output_tokens)
            counts = sequence.update_token_counts() if sequence.has_penalties else None
            sample = SampleSpec(params, sequence.key.choice_index, end, forbidden, counts)
        scoring = (
            sequence.build_logprobs_spec(start, end) if sequence.needs_prompt_logprobs else None
        )
        return SequenceSlice(
            sequence.id,
            tuple(sequence.token_ids[start:end]),
            start,
            sequence.block_table,
            sample,
            scoring,
        )

    def _accept_token(
        self, sequence: Sequence, token: int, score: TokenLogprobs | None
    ) -> SequenceOutcome:
        """One more token of output, and what follows from it."""
        sequence.token_ids.append(token)
        finish = finish_reason(
            sequence.work.request.sampling,
            self._eos_token_ids,
            self.limits.max_model_len,
            last_token=token,
            num_generated=sequence.num_output_tokens,
            num_tokens=len(sequence.token_ids),
        )
        event = TokenEvent(sequence.key, sequence.num_output_tokens - 1, token, finish, score)
        if sequence.is_prefill_only:
            self._sequences.change_state(sequence, HANDING_OFF)
            return PrefillCompleted(sequence, event)
        if finish is not None:
            self._cache_manager.finish_sequence(sequence)
        elif sequence.state is PREFILLING:
            self._sequences.change_state(sequence, RUNNING)
        return TokenEmitted(sequence, event)

    def _clear_step_in_flight(self) -> None:
        self._batch_in_flight = None
        self._sequences_in_flight = {}
        self._cache_manager.on_step_end()

    def _require_in_flight(self, batch: StepBatch) -> None:
        if batch is not self._batch_in_flight:
            raise BlockLedgerError("this is not the step in flight")
