"""Drafts tokens with a smaller model, for all sequences of a step at once.

The draft model has a paged cache of its own, with a fixed number of blocks. Its KV is a function of
the tokens of a sequence, so nothing of it is handed off: where a sequence begins to run, its
context is computed in chunks over several steps, and its drafts begin after that.

    tokens of the sequence    0 .......... length
    computed by the draft     0 .... num_computed |  -> the rest, then one token a draft step

A draft token is sampled as the step will sample at its position, with the same parameters and the
same noise. So the two models agree more often than two independent draws would.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.types import BlockIndex
from node_engine.core.step.step_batch import (
    SampleSpec,
    SequenceId,
    SequenceSlice,
    SliceResult,
    StepBatch,
)

# What may be computed of contexts in one step, so that a long prompt delays no step for long.
MAX_CATCH_UP_TOKENS = 256
MAX_CATCH_UP_SECONDS = 0.05
_FIRST_CATCH_UP_TOKENS = 32  # before it is known how long they take
_TYPICAL_CONTEXT_TOKENS = 2  # of a sequence, drafted in the step before

# Runs a step of the draft model; None if it has failed, and no further one may run.
RunDraftStep = Callable[[StepBatch], SequenceOf[SliceResult] | None]


class DraftOrder(NamedTuple):
    """What to draft for one sequence."""

    sequence_id: SequenceId
    token_ids: SequenceOf[int]  # all of the sequence, to which its owner appends
    is_running: Callable[[], bool]  # False once the sequence has ended here
    num_tokens: int  # at most, at least 1
    # How to sample the token that follows the sequence and these draft tokens.
    make_spec: Callable[[SequenceOf[int]], SampleSpec]


@dataclass(slots=True)
class _DraftContext:
    """The KV of one sequence in the cache of the draft model."""

    token_ids: SequenceOf[int]
    is_running: Callable[[], bool]
    block_table: list[BlockIndex] = field(default_factory=list)
    num_computed: int = 0  # leading positions whose KV is there
    # The tokens that were drafted behind the first `draft_start` of the sequence.
    draft_start: int = 0
    drafted: list[int] = field(default_factory=list)

    def confirm_drafts(self) -> None:
        """Keep of the KV what belongs to the tokens that the sequence has now.

        Its last token is computed once more, for what follows it.
        """
        tokens = self.token_ids
        for position, token in enumerate(self.drafted, self.draft_start):
            if position >= len(tokens) or tokens[position] != token:
                self.num_computed = min(self.num_computed, position)
                break
        self.num_computed = min(self.num_computed, len(tokens) - 1)
        self.drafted = []


class ModelDrafter:
    """Runs a draft model. Compute thread only."""

    def __init__(
        self,
        run_step: RunDraftStep,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        vocab_size: int,
        clock: Callable[[], float],
    ) -> None:
        """`vocab_size` is the number of token ids that both models know."""
        self._run_step = run_step
        self._free_blocks = list(map(BlockIndex, reversed(range(num_blocks))))
        self._block_size = block_size
        self._max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._clock = clock
        self._contexts: dict[SequenceId, _DraftContext] = {}
        self._ordered: frozenset[SequenceId] = frozenset()  # in the present call
        self._has_failed = False
        self._context_token_seconds: float | None = None  # measured last
        self._started_at = 0.0  # the plan of the present step
        # Of the present step: the time of its plan if it drafts, what was computed for it, and
        # whether that was little of contexts, so that its time tells what drafts cost.
        self.last_seconds = 0.0
        self.last_steps = self.last_tokens = 0
        self.is_typical = False
        self.total_seconds = 0.0

    @property
    def num_free_blocks(self) -> int:
        return len(self._free_blocks)

    def begin_plan(self) -> None:
        """The plan of a step begins; until `draft_tokens` is called, it has taken no time."""
        self._started_at = self._clock()
        self.last_seconds = 0.0

    def count_possible_tokens(self, length: int) -> int:
        """How many tokens could be drafted for a sequence of `length` tokens."""
        return 0 if self._has_failed else self._max_model_len + 1 - length

    def estimate_catch_up_seconds(self, sequence_id: SequenceId, length: int) -> float:
        """Seconds to compute the context of a sequence of `length` tokens, as far as known."""
        context = self._contexts.get(sequence_id)
        lacking = length - (context.num_computed if context is not None else 0)
        return max(0, lacking) * (self._context_token_seconds or 0.0)

    def draft_tokens(self, orders: SequenceOf[DraftOrder]) -> list[list[int]]:
        """Return the draft of each order; empty while its context is not computed.

        The work of a call is bounded: contexts are computed in chunks.
        """
        self.last_steps = self.last_tokens = 0
        self.release_ended_sequences()
        self._ordered = frozenset(order.sequence_id for order in orders)
        drafts: list[list[int]] = [[] for _ in orders]
        if not self._has_failed:
            self._draft_step_by_step(orders, drafts)
        self.last_seconds = self._clock() - self._started_at
        self.total_seconds += self.last_seconds
        return drafts

    def release_ended_sequences(self) -> None:
        """Return the blocks of sequences that no longer run here."""
        ended = [
            sequence_id
            for sequence_id, context in self._contexts.items()
            if not context.is_running()
        ]
        self._release_contexts(ended)

    def _release_contexts(self, sequence_ids: SequenceOf[SequenceId]) -> None:
        for sequence_id in sequence_ids:
            self._free_blocks += self._contexts.pop(sequence_id).block_table

    def _draft_step_by_step(
        self, orders: SequenceOf[DraftOrder], drafts: SequenceOf[list[int]]
    ) -> None:
        """Extend `drafts` by one token in each step of the draft model."""
        slices: dict[int, SequenceSlice] = {}  # by the place of the order
        allowed = budget = self._compute_catch_up_tokens()
        for place, order in enumerate(orders):
            slice_ = self._build_context_slice(order, budget)
            if slice_ is not None:
                slices[place] = slice_
                budget -= len(slice_.token_ids) - 1
        self.is_typical = allowed - budget <= _TYPICAL_CONTEXT_TOKENS * len(orders)
        while slices:
            batch = StepBatch(tuple(slices.values()))
            started = self._clock()
            results = self._run_step(batch)
            if self.last_steps == 0 and not self.is_typical:
                self._context_token_seconds = (self._clock() - started) / batch.num_tokens
            self.last_steps += 1
            self.last_tokens += batch.num_tokens
            if results is None:
                self._has_failed = True
                for draft in drafts:
                    draft.clear()
                return
            following: dict[int, SequenceSlice] = {}
            for (place, slice_), result in zip(slices.items(), results, strict=True):
                next_slice = self._apply_result(orders[place], slice_, result, drafts[place])
                if next_slice is not None:
                    following[place] = next_slice
            slices = following

    def _compute_catch_up_tokens(self) -> int:
        """How many tokens of contexts the next step may compute."""
        if self._context_token_seconds is None:
            return _FIRST_CATCH_UP_TOKENS
        fitting = MAX_CATCH_UP_SECONDS / max(self._context_token_seconds, 1e-9)
        return max(1, min(MAX_CATCH_UP_TOKENS, int(fitting)))

    def _build_context_slice(self, order: DraftOrder, budget: int) -> SequenceSlice | None:
        """The tokens of a sequence that the draft model lacks, with a sample after the last one.

        They are one token, or `budget` more. None without room, or for tokens that the draft model
        does not know.
        """
        context = self._contexts.setdefault(
            order.sequence_id, _DraftContext(order.token_ids, order.is_running)
        )
        context.confirm_drafts()
        tokens, start = order.token_ids, context.num_computed
        chunk = tuple(tokens[start : start + 1 + budget])
        end = start + len(chunk)
        is_last = end == len(tokens)
        if max(chunk) >= self.vocab_size:
            return None
        if not self._grow_table(context, end + (order.num_tokens - 1 if is_last else 0)):
            return None
        context.draft_start = len(tokens)
        spec = order.make_spec(()) if is_last else None
        return SequenceSlice(order.sequence_id, chunk, start, context.block_table, spec)

    def _apply_result(
        self, order: DraftOrder, slice_: SequenceSlice, result: SliceResult, draft: list[int]
    ) -> SequenceSlice | None:
        """Note what was computed; returns the slice of the next draft token, if one is wanted."""
        context = self._contexts[slice_.sequence_id]
        context.num_computed = end = slice_.start + len(slice_.token_ids)
        token = result.token_id
        if slice_.sample_spec is None or token is None or token >= self.vocab_size:
            return None
        draft.append(token)
        if len(draft) >= order.num_tokens or end + 1 > len(context.block_table) * self._block_size:
            return None
        context.drafted.append(token)
        return SequenceSlice(
            slice_.sequence_id, (token,), end, context.block_table, order.make_spec(draft)
        )

    def _grow_table(self, context: _DraftContext, num_positions: int) -> bool:
        """Make room for so many positions; returns whether there is.

        Sequences for which nothing is drafted now give up theirs.
        """
        positions = min(num_positions, self._max_model_len)
        lacking = -(-positions // self._block_size) - len(context.block_table)
        if lacking > len(self._free_blocks):
            self._release_contexts(
                [each for each in self._contexts if each not in self._ordered],
            )
        if lacking > len(self._free_blocks):
            return False
        for _ in range(lacking):
            context.block_table.append(self._free_blocks.pop())
        return True
