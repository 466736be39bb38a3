"""The scheduler of a node in either role: decides what the sequences compute in the next step.

A step has a budget of tokens. Running sequences take one each, and more for drafts if the step
computes no prompt (speculator.py). The rest, or what
`PrefillTokenBudget` grants of it, goes to prompts in chunks that end on block boundaries (except
the last chunk of a prompt). Unticketed prefills come last; then higher classes first, then earlier
virtual deadlines. A prompt's virtual deadline is the moment when this node has computed
PREFILL_STRETCH times as many prompt tokens since its arrival as it has itself: short prompts
overtake long ones, and none starves. The oldest prefill in progress gets a block in every step, so
that a hand-off always makes progress; for a few steps it does not, while prompts are spread in
chunks of one block (prompt_spreading.py). All blocks of a context are allocated at admission, so
that a partly computed prompt never waits for memory; a running sequence grows block by block.

    while True:
        step = scheduler.schedule_step()
        results = engine.run(step.batch)
        outcomes = scheduler.update_from_results(step.batch, results)

Every other method may be called at any time, also between `schedule_step` and
`update_from_results`: a sequence that ends there takes no further part, but its blocks are released
in `update_from_results`, because the engine may be writing them until then.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from itertools import count

from baton.kv.blocks import BlockHash, HashChain
from baton.types import AttemptKey, AttemptSpec, BlockIndex, TicketId, TokenLogprobs
from node_engine.core.blocks.block_pool import BlockPool
from node_engine.core.blocks.block_records import BlockLedgerError
from node_engine.core.blocks.pool_prefix import PoolPrefix, RefCountedPin
from node_engine.core.scheduling.capacity import (
    AdmissionEstimate,
    CapacityRefusal,
    SchedulerLimits,
)
from node_engine.core.scheduling.dedup import dedup_to_shared_pool
from node_engine.core.scheduling.kv_cache_manager import CopyBlocks, KVCacheManager, NodeCapacity
from node_engine.core.scheduling.preemption import (
    BlockReleaser,
    MostBlocksFirst,
    PreemptionPolicy,
    Preemptor,
)
from node_engine.core.scheduling.prefill_token_budget import PrefillTokenBudget
from node_engine.core.scheduling.sequence_decoder import make_sequence_decoder
from node_engine.core.sequences.outcomes import ScheduledStep, SequenceOutcome
from node_engine.core.sequences.sequence import Sequence, SequenceState, SequenceTable
from node_engine.core.sequences.token_constraint import TokenConstraint
from node_engine.core.step.step_batch import SequenceId, SliceResult, StepBatch

WAITING, PREFILLING = SequenceState.WAITING, SequenceState.PREFILLING
HANDING_OFF, AWAITING_KV = SequenceState.HANDING_OFF, SequenceState.AWAITING_KV
RUNNING = SequenceState.RUNNING
PREFILL_STRETCH = 4  # tokens of other prompts that may overtake each token of a prompt


class Scheduler:
    """Schedules the sequences of a node, at most one per attempt key. Compute thread only."""

    def __init__(
        self,
        pool: BlockPool,
        limits: SchedulerLimits,
        eos_token_ids: tuple[int, ...] = (),
        preemption_policy: PreemptionPolicy | None = None,
        copy_pool_blocks: CopyBlocks | None = None,
    ) -> None:
        """`copy_pool_blocks`: as for KVCacheManager. Raises ConfigError for inconsistent limits."""
        limits.check(pool.block_size)
        self.block_pool = pool
        self.limits = limits
        self.prefill_budget = PrefillTokenBudget(pool.block_size)
        self._eos_token_ids = eos_token_ids
        self._arrival_counter = count()
        self.sequences = SequenceTable()  # every live one
        capacity = self.capacity = NodeCapacity(pool, self.sequences, limits)
        self._releaser = BlockReleaser(pool, self.sequences)
        self._preemptor = Preemptor(
            pool,
            self.sequences,
            self._releaser,
            preemption_policy or MostBlocksFirst(),
            lambda: capacity.free_blocks,  # not `self`: a cycle would keep a draft model's memory
        )
        self._cache_manager = KVCacheManager(
            pool, self.sequences, self.capacity, self._preemptor, copy_pool_blocks
        )
        self._decoder = make_sequence_decoder(
            self.sequences,
            self._cache_manager,
            self._releaser,
            self.prefill_budget,
            limits,
            eos_token_ids,
        )
        self.speculator = self._decoder.speculator
        self._num_prefilled_tokens = 0  # prompt tokens computed so far: the virtual time
        self._batch_in_flight: StepBatch | None = None
        # Of the step in flight, also those that have ended since it began.
        self.sequences_in_flight: Mapping[SequenceId, Sequence] = {}

    # adding and ending sequences

    def estimate_admission(
        self, work: AttemptSpec, root_hash: BlockHash, pool_prefix: PoolPrefix | None = None
    ) -> AdmissionEstimate:
        """Estimate what serving `work` here would take. Changes nothing.

        Raises ContextLengthExceeded or OutOfBlocks if the context can never fit.
        """
        sequence = self._create_sequence(work, root_hash, is_prefill_only=False)
        sequence.pool_use.prefix = pool_prefix
        return self._cache_manager.estimate_admission(sequence)

    def add_sequence(
        self,
        work: AttemptSpec,
        root_hash: BlockHash,
        *,
        is_prefill_only: bool = False,
        pool_prefix: PoolPrefix | None = None,
        constraint: TokenConstraint | None = None,
    ) -> Sequence:
        """Add a sequence whose context is computed here.

        It is decoded here as well or, with `is_prefill_only`, ends with its first token.
        `pool_prefix` is what the shared pool has of its context, `constraint` the grammar of its
        output after the tokens that were emitted before. Raises ContextLengthExceeded or
        OutOfBlocks if the context can never fit; nothing is then kept.
        """
        sequence = self._create_sequence(work, root_hash, is_prefill_only)
        sequence.pool_use.prefix = pool_prefix.acquire() if pool_prefix else None
        sequence.constraint = constraint
        self.sequences.add_sequence(sequence)
        return sequence

    def reserve_for_handoff(
        self,
        work: AttemptSpec,
        root_hash: BlockHash,
        ticket: TicketId,
        pool_prefix: PoolPrefix | None = None,
        constraint: TokenConstraint | None = None,
    ) -> Sequence | CapacityRefusal:
        """Add a sequence whose KV another node writes under `ticket`, or refuse it at once.

        Afterwards `block_table` has the matched prefix and `reserved_blocks` the blocks to be
        written behind it. Raises ContextLengthExceeded or OutOfBlocks if the context can never fit;
        nothing is then kept.
        """
        sequence = self._create_sequence(work, root_hash, is_prefill_only=False)
        sequence.pool_use.prefix = pool_prefix.acquire() if pool_prefix else None
        refusal = self._cache_manager.reserve_for_handoff(sequence, ticket)
        if refusal is not None:
            sequence.pool_use.set_prefix(None)
            return refusal
        sequence.constraint = constraint
        self.sequences.add_sequence(sequence)
        self.sequences.change_state(sequence, AWAITING_KV)
        return sequence

    def commit_handoff(
        self, key: AttemptKey, sampled: tuple[int, ...] = (), score: TokenLogprobs | None = None
    ) -> list[SequenceOutcome]:
        """The hand-off is complete: commit its blocks and start to decode.

        `sampled` has the first token and `score` its logprobs, if the other node has sampled it.
        Without it, the last token of the context is computed here.
        """
        sequence = self.sequences.require_sequence(key, AWAITING_KV)
        if len(sampled) > 1:
            raise BlockLedgerError(
                f"sequence {key}: {len(sampled)} tokens sampled by prefill, at most 1 is possible"
            )
        self._cache_manager.commit_handoff(sequence, sequence.context_len + len(sampled) - 1)
        self.sequences.change_state(sequence, RUNNING)
        return [self._decoder.accept_first_token(sequence, token, score) for token in sampled]

    def mark_ticketed(self, key: AttemptKey) -> None:
        """Note that a decode node has reserved blocks for this prefill and let it write them."""
        sequence = self.sequences.require_sequence(key, WAITING, PREFILLING, HANDING_OFF)
        if not sequence.has_ticket:
            sequence.has_ticket, sequence.arrival_order = True, next(self._arrival_counter)

    def stop_prefill(self, key: AttemptKey) -> None:
        """Stop a prefill whose blocks a sender may read: HANDING_OFF until `finish_handoff`."""
        sequence = self.sequences.require_sequence(key, WAITING, PREFILLING, HANDING_OFF)
        sequence.is_stopped = True
        if sequence.state is not HANDING_OFF:
            self.sequences.change_state(sequence, HANDING_OFF)

    def finish_handoff(self, key: AttemptKey) -> None:
        """The sender no longer reads the blocks of this HANDING_OFF sequence: end it."""
        self._releaser.finish_sequence(self.sequences.require_sequence(key, HANDING_OFF))

    def cancel_sequence(self, key: AttemptKey) -> bool:
        """End a sequence in any state and release its blocks; returns False if there is none.

        `reserved_blocks` belong to the ticket and are released when its writer is fenced off.
        """
        sequence = self.sequences.get(key)
        if sequence is not None:
            self._releaser.finish_sequence(sequence)
        return sequence is not None

    def dedup_to_shared_pool(
        self, chain: HashChain, blocks: tuple[BlockIndex, ...], pin: RefCountedPin
    ) -> int:
        """Replace own copies of `chain`'s full blocks 0, 1, ... by the pool's `blocks`.

        Must not be called between `schedule_step` and `update_from_results`. Returns the number of
        copies removed.
        """
        if self._batch_in_flight is not None:
            raise BlockLedgerError("block tables may change only between two steps")
        return dedup_to_shared_pool(self.block_pool, self.sequences, chain, blocks, pin)

    # steps

    def schedule_step(self) -> ScheduledStep:
        """Decide the next step; for a batch, call `update_from_results` or `abandon_step` next.

        Raises BlockLedgerError while a step is in flight.
        """
        if self._batch_in_flight is not None:
            raise BlockLedgerError("the step in flight has not been updated")
        growing = self._decoder.grow_running_sequences()
        chosen = [(sequence, 1) for sequence in growing]
        budget, reserved = self._limit_prompt_tokens(growing)
        self._admit_waiting_sequences(budget)
        prefilling = sorted(
            self.sequences.get_by_state(PREFILLING).values(),
            key=lambda sequence: sequence.priority_key,
        )
        oldest = min(
            (
                sequence
                for sequence in prefilling
                if sequence.has_started_prefill and not sequence.is_unticketed
            ),
            key=lambda sequence: sequence.arrival_order,
            default=None,
        )
        for sequence in prefilling:
            oldest = None if sequence is oldest else oldest
            length = self._chunk_length(sequence, budget - (reserved if oldest else 0))
            if length:
                chosen.append((sequence, length))
                budget -= length
        self._cache_manager.grow_ahead(chosen[len(growing) :])
        if self.speculator.is_enabled:
            self.speculator.plan_drafts(growing, has_prompts=len(chosen) > len(growing))
        outcomes = self._preemptor.pop_outcomes() if self._preemptor.outcomes else ()
        return ScheduledStep(self._build_batch(chosen) if chosen else None, outcomes)

    def update_from_results(
        self, batch: StepBatch, results: SequenceOf[SliceResult]
    ) -> list[SequenceOutcome]:
        """Apply the results of a step, one per slice; returns what became of its sequences."""
        self._require_in_flight(batch)
        outcomes: list[SequenceOutcome] = []
        for slice_, result in zip(batch.slices, results, strict=True):
            sequence = self.sequences_in_flight[slice_.sequence_id]
            if sequence.state not in (PREFILLING, RUNNING):
                continue  # cancelled or stopped meanwhile
            self._cache_manager.on_copy_done(sequence)
            if result.is_deferred:  # but not its copy
                continue
            if sequence.state is PREFILLING:
                self._num_prefilled_tokens += len(slice_.token_ids)
            outcomes.extend(self._decoder.apply_result(sequence, slice_, result))
        self._clear_step_in_flight()
        return outcomes

    def abandon_step(self, batch: StepBatch) -> None:
        """The step failed: its sequences are as before `schedule_step` and may be tried again."""
        self._require_in_flight(batch)
        self._clear_step_in_flight()

    # helpers

    def _create_sequence(
        self, work: AttemptSpec, root_hash: BlockHash, is_prefill_only: bool
    ) -> Sequence:
        tokens = list(work.context_token_ids)
        if not tokens or self.sequences.get(work.key) is not None:
            raise BlockLedgerError(
                f"sequence {work.key} has {len(tokens)} tokens, or exists already"
            )
        self.capacity.check_context(work.key, len(tokens))
        chain = HashChain(root_hash, tokens, self.block_pool.block_size)
        sequence_id = SequenceId(next(self._arrival_counter))
        sequence = Sequence(sequence_id, work, tokens, chain, is_prefill_only)
        sequence.virtual_deadline = self._num_prefilled_tokens + PREFILL_STRETCH * len(tokens)
        return sequence

    def _limit_prompt_tokens(self, growing: list[Sequence]) -> tuple[int, int]:
        """Prompt tokens of the step, and how many of them the oldest prefill in progress gets."""
        left = self.limits.max_batched_tokens - len(growing)
        block_size = self.block_pool.block_size
        waiting = self.sequences.get_by_state(WAITING)
        prefilling = self.sequences.get_by_state(PREFILLING)
        if not self.prefill_budget.is_bounded or not (waiting or prefilling):
            return left, block_size
        context_tokens = sum(len(sequence.token_ids) for sequence in growing)
        computed_tokens = max(
            (sequence.num_computed_tokens for sequence in prefilling.values()), default=0
        )
        waiting_tokens = sum(
            sequence.context_len - sequence.num_computed_tokens
            for sequences in (waiting, prefilling)
            for sequence in sequences.values()
        )
        limit = self.prefill_budget.compute_token_limit(
            len(growing), context_tokens, computed_tokens, waiting_tokens
        )
        tokens = left if limit.tokens is None else min(left, limit.tokens)
        # A single block is of the first prompt in order, which might have been computed at once.
        return tokens, 0 if limit.is_spread and tokens < 2 * block_size else block_size

    def _admit_waiting_sequences(self, budget: int) -> None:
        """Admit WAITING sequences in order, while the step has tokens left for the next one."""
        waiting = self.sequences.get_by_state(WAITING)
        prefilling = self.sequences.get_by_state(PREFILLING)
        while waiting and self.capacity.free_slots:
            head = min(waiting.values(), key=lambda sequence: sequence.priority_key)
            left = budget - sum(
                sequence.context_len - sequence.num_computed_tokens
                for sequence in prefilling.values()
                if sequence.priority_key < head.priority_key
            )
            if left < min(
                self.block_pool.block_size, head.context_len
            ) or not self._cache_manager.admit_sequence(head):
                return

    def _chunk_length(self, sequence: Sequence, budget: int) -> int:
        """Prompt tokens that fit the budget: all that remain, or up to a block boundary."""
        start, end = sequence.num_computed_tokens, sequence.context_len
        if end - start > budget:
            end = (start + budget) // self.block_pool.block_size * self.block_pool.block_size
        return max(0, end - start)

    def _build_batch(self, chosen: list[tuple[Sequence, int]]) -> StepBatch:
        copies = tuple(
            sequence.pending_copy for sequence, _ in chosen if sequence.pending_copy is not None
        )
        slices = tuple(
            sequence.build_slice(length, self._eos_token_ids) for sequence, length in chosen
        )
        self._batch_in_flight = batch = StepBatch(slices, copies)
        self.sequences_in_flight = {sequence.id: sequence for sequence, _ in chosen}
        self._releaser.ids_in_flight = self.sequences_in_flight.keys()
        return batch

    def _clear_step_in_flight(self) -> None:
        self._batch_in_flight, self.sequences_in_flight = None, {}
        self._releaser.end_step()

    def _require_in_flight(self, batch: StepBatch) -> None:
        if batch is not self._batch_in_flight:
            raise BlockLedgerError("this is not the step in flight")
