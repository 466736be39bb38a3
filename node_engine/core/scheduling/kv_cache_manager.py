"""Gives KV blocks to sequences: prefix reuse, admission, reservation for a hand-off, growth.

Blocks of the host's shared pool stand in the block table beside own blocks, and the sequence pins
the pool's pin for that time (pool_prefix.py). Where kernels cannot read the pool's memory, its
blocks are copied into own blocks at once. `NodeCapacity` says what is left for new work, and
preemption.py how blocks are taken back.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from baton.errors import ContextLengthExceeded, OutOfBlocks
from baton.types import AttemptKey, BlockIndex, TicketId
from node_engine.core.blocks.block_pool import BlockPool, PrefixMatch
from node_engine.core.blocks.block_records import BlockLedgerError
from node_engine.core.scheduling.capacity import (
    AdmissionEstimate,
    CapacityRefusal,
    SchedulerLimits,
    SchedulerLoad,
)
from node_engine.core.scheduling.preemption import Preemptor
from node_engine.core.sequences.sequence import Sequence, SequenceState, SequenceTable

WAITING, PREFILLING = SequenceState.WAITING, SequenceState.PREFILLING
RUNNING, AWAITING_KV = SequenceState.RUNNING, SequenceState.AWAITING_KV

# Copies whole blocks: pairs of source and destination.
CopyBlocks = Callable[[SequenceOf[tuple[BlockIndex, BlockIndex]]], None]


class NodeCapacity:
    """What the sequences of a node leave of its slots and blocks. It changes nothing.

    WAITING sequences that are entitled to room (local or ticketed prefills) have a claim on it.
    """

    def __init__(self, pool: BlockPool, sequences: SequenceTable, limits: SchedulerLimits) -> None:
        self._block_pool = pool
        self._sequences = sequences
        self.limits = limits

    @property
    def free_slots(self) -> int:
        """How many more sequences may compute or await KV."""
        taken = sum(
            len(self._sequences.get_by_state(state)) for state in (PREFILLING, RUNNING, AWAITING_KV)
        )
        return max(0, self.limits.max_num_seqs - taken)

    @property
    def free_blocks(self) -> int:
        """Blocks for new work; one per running sequence is kept back, so that it can grow."""
        running = len(self._sequences.get_by_state(RUNNING))
        return max(0, self._block_pool.num_available_blocks - running)

    @property
    def unclaimed_slots(self) -> int:
        """`free_slots` minus those for entitled WAITING sequences."""
        return max(0, self.free_slots - len(self._list_entitled_waiting()))

    @property
    def unclaimed_blocks(self) -> int:
        """`free_blocks` minus those that entitled WAITING sequences may need."""
        claimed = sum(
            self.count_blocks_for(sequence.context_len)
            for sequence in self._list_entitled_waiting()
        )
        return max(0, self.free_blocks - claimed)

    def count_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_pool.block_size)

    def check_context(self, key: AttemptKey, num_tokens: int) -> None:
        """Raise ContextLengthExceeded or OutOfBlocks if the context can never fit on this node."""
        if num_tokens >= self.limits.max_model_len:
            raise ContextLengthExceeded(
                f"{key} has {num_tokens} tokens, max_model_len is {self.limits.max_model_len}:"
                " raise --max-model-len or shorten the prompt"
            )
        needed = self.count_blocks_for(num_tokens)
        if needed > self._block_pool.num_blocks:
            raise OutOfBlocks(
                f"{key} needs {needed} blocks, the cache has {self._block_pool.num_blocks}:"
                " raise --kv-memory"
            )

    def get_load(self) -> SchedulerLoad:
        queued = sum(
            sequence.context_len - sequence.num_computed_tokens
            for state in (WAITING, PREFILLING)
            for sequence in self._sequences.get_by_state(state).values()
        )
        return SchedulerLoad(
            {state: len(self._sequences.get_by_state(state)) for state in SequenceState}, queued
        )

    def _list_entitled_waiting(self) -> SequenceOf[Sequence]:
        return [
            sequence
            for sequence in self._sequences.get_by_state(WAITING).values()
            if not sequence.is_unticketed
        ]


class KVCacheManager:
    """Gives blocks to sequences. Compute thread only."""

    def __init__(
        self,
        pool: BlockPool,
        sequences: SequenceTable,
        capacity: NodeCapacity,
        preemptor: Preemptor,
        copy_pool_blocks: CopyBlocks | None = None,
    ) -> None:
        """`copy_pool_blocks` copies pool blocks into own ones; None: they are read in place."""
        self._block_pool = pool
        self._sequences = sequences
        self._capacity = capacity
        self._preemptor = preemptor
        self._copy_pool_blocks = copy_pool_blocks

    def estimate_admission(self, sequence: Sequence) -> AdmissionEstimate:
        """What admitting this sequence would take. Changes nothing."""
        match = self._match_prefix(sequence)
        slots, blocks = self._capacity.unclaimed_slots, self._capacity.unclaimed_blocks
        needed = self._count_missing_blocks(sequence, match)
        refusal = None
        if not slots or needed > blocks:
            refusal = CapacityRefusal(needed, blocks, slots)
        partial = (match.partial_hit.source_block,) if match.partial_hit else ()
        self._block_pool.release_blocks((*match.blocks, *partial), sequence.owner)
        return AdmissionEstimate(sequence.context_len - match.num_tokens, refusal)

    def admit_sequence(self, sequence: Sequence) -> bool:
        """Give a WAITING sequence all blocks of its context and reuse its cached prefix.

        Returns False if there are too few blocks now.
        """
        match = self._match_prefix(sequence)
        needed = self._count_missing_blocks(sequence, match)
        fresh = self._allocate_blocks(sequence, needed)
        covered, partial = match.num_tokens, match.partial_hit
        if partial and fresh is None and self._block_pool.is_own_block(partial.source_block):
            # Without the reference on the partial block there may be enough.
            self._block_pool.release_blocks((partial.source_block,), sequence.owner)
            covered, partial = covered - partial.num_tokens, None
            fresh = self._allocate_blocks(sequence, needed)
        if fresh is None:
            self._block_pool.release_blocks(match.blocks, sequence.owner)
            return False
        if self._preemptor.requeued:
            self._preemptor.on_admitted(sequence)
        fresh = self._start_block_table(
            sequence, replace(match, partial_hit=partial, num_tokens=covered), fresh
        )
        sequence.block_table.extend(fresh)
        if partial:
            self._copy_partial_block(sequence, partial.source_block, fresh[0])
        self._keep_pool_pin(sequence)
        self._sequences.change_state(sequence, SequenceState.PREFILLING)
        return True

    def reserve_for_handoff(self, sequence: Sequence, ticket: TicketId) -> CapacityRefusal | None:
        """Match the cached prefix of a new sequence and reserve the rest for a KV writer.

        Never waits, and takes no blocks that WAITING sequences are entitled to.
        """
        slots, limit = self._capacity.unclaimed_slots, self._capacity.unclaimed_blocks
        match = self._match_prefix(sequence, allow_partial=False)
        needed = self._count_missing_blocks(sequence, match)
        limit = min(limit, self._capacity.free_blocks)  # matched blocks can no longer be evicted
        lacking = self._capacity.count_blocks_for(sequence.context_len) - len(match.blocks)
        reserved = (
            self._block_pool.reservations.reserve_for_ticket(lacking, ticket, sequence.owner)
            if slots and needed <= limit
            else None
        )
        if reserved is None:
            self._block_pool.release_blocks(match.blocks, sequence.owner)
            return CapacityRefusal(needed, limit, slots)
        sequence.ticket_id, sequence.reserved_blocks = ticket, reserved
        self._start_block_table(
            sequence,
            match,
            self._block_pool.allocate_blocks(needed - lacking, sequence.owner) or (),
        )
        self._keep_pool_pin(sequence)
        return None

    def commit_handoff(self, sequence: Sequence, num_computed: int) -> None:
        """The reserved blocks are written: the KV of `num_computed` tokens is here."""
        if sequence.ticket_id is None:
            raise BlockLedgerError(f"sequence {sequence.key} has no ticket")
        sequence.block_table.extend(self._block_pool.reservations.commit_ticket(sequence.ticket_id))
        sequence.ticket_id, sequence.reserved_blocks = None, ()
        sequence.num_computed_tokens = num_computed
        self.index_full_blocks(sequence)

    def index_full_blocks(self, sequence: Sequence) -> None:
        """Index the blocks that have become full, and the partly filled end of the context.

        Other choices of the same prompt can then reuse the whole context.
        """
        size = self._block_pool.block_size
        end = sequence.num_computed_tokens // size
        sequence.chain.compute_hashes(end)
        for number in range(sequence.num_indexed_blocks, end):
            self._block_pool.index_block(sequence.block_table[number], sequence.chain, number)
            sequence.num_indexed_blocks = number + 1
        if sequence.num_computed_tokens == sequence.context_len and sequence.context_len % size:
            number, length = divmod(sequence.context_len, size)
            self._block_pool.index_block(
                sequence.block_table[number], sequence.chain, number, length
            )

    def grow_sequence(self, sequence: Sequence) -> bool:
        """Make room for the KV of a RUNNING sequence's next token, by preemption if necessary.

        Returns False if the sequence must wait or has ended.
        """
        needed = self._capacity.count_blocks_for(sequence.num_computed_tokens + 1)
        if needed <= len(sequence.block_table):
            return True
        while (fresh := self._block_pool.allocate_blocks(1, sequence.owner)) is None:
            if not self._preemptor.take_block_for(sequence):
                return False
        sequence.block_table.extend(fresh)
        return True

    def grow_for_drafts(self, sequence: Sequence, num_drafts: int) -> int:
        """Make room for draft tokens behind the next token, with blocks that nobody waits for.

        Returns how many of `num_drafts` there is room for.
        """
        table, size = sequence.block_table, self._block_pool.block_size
        needed = self._capacity.count_blocks_for(sequence.num_computed_tokens + 1 + num_drafts)
        lacking = needed - len(table)
        if lacking > 0:
            lacking = min(lacking, self._capacity.unclaimed_blocks)
            table.extend(self._block_pool.allocate_blocks(lacking, sequence.owner) or ())
        return min(num_drafts, len(table) * size - sequence.num_computed_tokens - 1)

    def release_draft_blocks(self, sequence: Sequence) -> None:
        """After a step: release the blocks that were for rejected drafts alone."""
        needed = self._capacity.count_blocks_for(sequence.num_computed_tokens + 1)
        unused = sequence.block_table[needed:]
        if unused:
            del sequence.block_table[needed:]
            self._block_pool.release_blocks(unused, sequence.owner)

    def grow_ahead(self, chosen: Iterable[tuple[Sequence, int]]) -> None:
        """Take a block for the lookahead of the engine where it can be used and one is free.

        Each sequence comes with the number of its tokens in the step. The step must sample for it,
        and another token must follow here.
        """
        ahead = self._capacity.limits.lookahead_tokens
        for sequence, num_tokens in chosen if ahead else ():
            num_computed = sequence.num_computed_tokens + num_tokens
            is_useful = (
                sequence.state in (RUNNING, PREFILLING)
                and num_computed >= sequence.context_len
                and sequence.num_remaining_tokens > 1
                and not sequence.is_prefill_only
            )
            needed = self._capacity.count_blocks_for(num_computed + ahead)
            if is_useful and needed > len(sequence.block_table):
                fresh = self._block_pool.allocate_blocks(1, sequence.owner)
                sequence.block_table.extend(fresh or ())

    def on_copy_done(self, sequence: Sequence) -> None:
        """The step has made the sequence's copy on write: release the source block."""
        if sequence.pending_copy is not None:
            self._block_pool.release_blocks((sequence.pending_copy[0],), sequence.owner)
            sequence.pending_copy = None

    # the shared pool

    def _match_prefix(self, sequence: Sequence, *, allow_partial: bool = True) -> PrefixMatch:
        """Match the context in own cache and pool; own blocks and the longer partial hit win."""
        pool_prefix, limit = sequence.pool_use.prefix, sequence.num_reusable_tokens
        pool_blocks = pool_prefix.blocks if pool_prefix else ()
        match = self._block_pool.match_prefix(
            sequence.chain,
            limit,
            sequence.owner,
            allow_partial=allow_partial,
            pool_blocks=pool_blocks,
        )
        pool_hit = (
            pool_prefix.partial_hit
            if pool_prefix and allow_partial and len(match.blocks) == len(pool_blocks)
            else None
        )
        own_hit = match.partial_hit
        if pool_hit is None or (own_hit is not None and own_hit.num_tokens >= pool_hit.num_tokens):
            return match
        if own_hit is not None:
            self._block_pool.release_blocks((own_hit.source_block,), sequence.owner)
        return PrefixMatch(
            match.blocks,
            pool_hit,
            len(match.blocks) * self._block_pool.block_size + pool_hit.num_tokens,
        )

    def _count_pool_blocks(self, blocks: SequenceOf[BlockIndex]) -> int:
        return sum(not self._block_pool.is_own_block(block) for block in blocks)

    def _count_missing_blocks(self, sequence: Sequence, match: PrefixMatch) -> int:
        """Own blocks that the context needs beside the matched ones that can be read in place."""
        missing = self._capacity.count_blocks_for(sequence.context_len) - len(match.blocks)
        return missing + (self._count_pool_blocks(match.blocks) if self._copy_pool_blocks else 0)

    def _copy_partial_block(
        self, sequence: Sequence, source: BlockIndex, block: BlockIndex
    ) -> None:
        """Copy `source` to `block`: in the next step, or at once if kernels cannot read it."""
        if self._copy_pool_blocks and not self._block_pool.is_own_block(source):
            self._copy_pool_blocks([(source, block)])
        else:
            sequence.pending_copy = (source, block)

    def _keep_pool_pin(self, sequence: Sequence) -> None:
        """After admission: keep the pool's pin if the sequence reads pool blocks."""
        use = sequence.pool_use
        reads = use.num_blocks or (
            sequence.pending_copy is not None
            and not self._block_pool.is_own_block(sequence.pending_copy[0])
        )
        if use.prefix and reads:
            use.pins.append(use.prefix.pin.acquire())
        use.set_prefix(None)

    # helpers

    def _start_block_table(
        self, sequence: Sequence, match: PrefixMatch, fresh: tuple[BlockIndex, ...]
    ) -> tuple[BlockIndex, ...]:
        """Begin the block table with the matched blocks. Returns the unused blocks of `fresh`."""
        self._count_pool_use(sequence, match)
        sequence.block_table = list(match.blocks)
        if self._copy_pool_blocks and sequence.pool_use.num_blocks:
            fresh = self._copy_matched_pool_blocks(sequence, fresh)
        sequence.num_indexed_blocks = len(match.blocks)
        sequence.num_cached_tokens = sequence.num_computed_tokens = match.num_tokens
        return fresh

    def _count_pool_use(self, sequence: Sequence, match: PrefixMatch) -> None:
        use, size = sequence.pool_use, self._block_pool.block_size
        use.num_blocks = self._count_pool_blocks(match.blocks)
        use.num_tokens = use.num_blocks * size
        partial = match.partial_hit
        if partial is not None and not self._block_pool.is_own_block(partial.source_block):
            use.num_tokens += partial.num_tokens
        num_remote_blocks = use.prefix.num_remote_blocks if use.prefix else 0
        use.num_remote_tokens = min(use.num_blocks, num_remote_blocks) * size

    def _copy_matched_pool_blocks(
        self, sequence: Sequence, fresh: tuple[BlockIndex, ...]
    ) -> tuple[BlockIndex, ...]:
        """Copy pool blocks of the table into the first of `fresh`. Returns the rest of `fresh`."""
        assert self._copy_pool_blocks is not None
        table = sequence.block_table
        places = [
            number for number, block in enumerate(table) if not self._block_pool.is_own_block(block)
        ]
        copies, rest = fresh[: len(places)], fresh[len(places) :]
        self._copy_pool_blocks(
            [(table[number], copy) for number, copy in zip(places, copies, strict=True)]
        )
        for number, copy in zip(places, copies, strict=True):
            table[number] = copy
            self._block_pool.index_block(copy, sequence.chain, number)
        sequence.pool_use.num_blocks = 0
        return rest

    def _allocate_blocks(self, sequence: Sequence, needed: int) -> tuple[BlockIndex, ...] | None:
        if not sequence.is_unticketed:
            self._preemptor.requeue_unticketed_for(sequence, needed)
        if needed > self._capacity.free_blocks:
            return None
        return self._block_pool.allocate_blocks(needed, sequence.owner)
