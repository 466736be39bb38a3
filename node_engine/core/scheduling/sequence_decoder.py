"""What running sequences compute in a step, and what a step's results mean for their sequences."""

from collections.abc import Iterator

from baton.types import TokenLogprobs
from node_engine.core.blocks.block_records import BlockLedgerError
from node_engine.core.scheduling.capacity import SchedulerLimits
from node_engine.core.scheduling.kv_cache_manager import KVCacheManager
from node_engine.core.scheduling.preemption import BlockReleaser
from node_engine.core.scheduling.prefill_token_budget import PrefillTokenBudget
from node_engine.core.scheduling.speculator import Speculator
from node_engine.core.scheduling.token_acceptor import TokenAcceptor
from node_engine.core.sequences.outcomes import (
    DraftsVerified,
    PromptLogprobsComputed,
    SequenceOutcome,
)
from node_engine.core.sequences.sequence import Sequence, SequenceState, SequenceTable
from node_engine.core.sequences.stop_rules import unwanted_ends
from node_engine.core.step.step_batch import SequenceSlice, SliceResult

RUNNING = SequenceState.RUNNING


class SequenceDecoder:
    """Plans the running sequences of a step, and applies results. Compute thread only."""

    def __init__(
        self,
        sequences: SequenceTable,
        cache_manager: KVCacheManager,
        token_acceptor: TokenAcceptor,
        speculator: Speculator,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._sequences = sequences
        self._cache_manager = cache_manager
        self._token_acceptor = token_acceptor
        self._eos_token_ids = eos_token_ids
        self.speculator = speculator

    def grow_running_sequences(self) -> list[Sequence]:
        """Make room for the next token of running sequences, oldest first; preempts if necessary.

        Returns those that take part in the step.
        """
        running = self._sequences.get_by_state(RUNNING)
        ready: list[Sequence] = []
        for sequence_id in sorted(running):
            sequence = running.get(sequence_id)
            if sequence is None or not self._can_join_step(sequence):
                continue
            if self._cache_manager.grow_sequence(sequence):
                ready.append(sequence)
        # With blocks that nobody needs for this step.
        self._cache_manager.grow_ahead((sequence, 1) for sequence in ready)
        return [sequence for sequence in ready if sequence.state is RUNNING]

    def accept_first_token(
        self, sequence: Sequence, token: int, score: TokenLogprobs | None
    ) -> SequenceOutcome:
        """Append the token that the prefill node has sampled."""
        return self._token_acceptor.accept_token(sequence, token, score)

    def apply_result(
        self, sequence: Sequence, slice_: SequenceSlice, result: SliceResult
    ) -> Iterator[SequenceOutcome]:
        """Apply what a step has computed for a slice of a prefilling or running sequence."""
        sequence.num_computed_tokens += len(slice_.token_ids) - len(slice_.draft_specs)
        self._cache_manager.index_full_blocks(sequence)
        if slice_.logprobs_spec is not None:
            yield PromptLogprobsComputed(sequence, slice_.start + 1, result.prompt_logprobs)
        if slice_.sample_spec is None:
            return
        has_proposal = sequence.drafting is not None and sequence.drafting.has_proposal
        first_new = len(sequence.token_ids)
        yield self._append_token(sequence, result)
        for draft, after_draft in zip(slice_.draft_token_ids, result.after_drafts, strict=True):
            if sequence.state is not RUNNING or sequence.token_ids[-1] != draft:
                break
            # The draft is part of the output, and so its KV is in the cache.
            sequence.num_computed_tokens += 1
            self._cache_manager.index_full_blocks(sequence)
            yield self._append_token(sequence, after_draft)
        if has_proposal:
            yield from self._record_drafts(sequence, slice_, first_new)

    def _append_token(self, sequence: Sequence, result: SliceResult) -> SequenceOutcome:
        if result.token_id is None:
            raise BlockLedgerError(f"sequence {sequence.key}: no token was sampled")
        return self._token_acceptor.accept_token(sequence, result.token_id, result.logprobs)

    def _record_drafts(
        self, sequence: Sequence, slice_: SequenceSlice, first_new: int
    ) -> Iterator[SequenceOutcome]:
        is_running = sequence.state is RUNNING
        drafts = self.speculator.record_slice(
            sequence, slice_, sequence.token_ids[first_new:], has_ended=not is_running
        )
        if is_running:
            self._cache_manager.release_draft_blocks(sequence)
        if drafts.num_drafted:
            yield DraftsVerified(sequence, drafts)

    def _can_join_step(self, sequence: Sequence) -> bool:
        """Whether a step that samples for a sequence need not wait for its grammar."""
        if sequence.constraint is None:
            return True
        params = sequence.work.request.sampling
        return sequence.constraint.can_join_step(
            unwanted_ends(params, self._eos_token_ids, sequence.num_output_tokens)
        )


def make_sequence_decoder(
    sequences: SequenceTable,
    cache_manager: KVCacheManager,
    releaser: BlockReleaser,
    step_budget: PrefillTokenBudget,
    limits: SchedulerLimits,
    eos_token_ids: tuple[int, ...],
) -> SequenceDecoder:
    """The decoder of a scheduler that is made of these parts."""
    return SequenceDecoder(
        sequences,
        cache_manager,
        TokenAcceptor(sequences, releaser, eos_token_ids, limits.max_model_len),
        Speculator(limits, eos_token_ids, cache_manager, step_budget),
        eos_token_ids,
    )
