"""Gives KV blocks to sequences and takes them back: prefix reuse, growth, preemption.

When a block is missing, unticketed prefills are requeued first, the lowest class and then the
newest first; then a running or locally prefilling sequence is preempted (preemption.py selects it).
Blocks under a ticket or read by a sender are never taken: they are returned when the hand-off ends,
and the sequence that needs them waits.

Blocks of the host's shared pool stand in the block table beside own blocks, and the sequence pins
the pool's pin for that time (pool_prefix.py). Where kernels cannot read the pool's memory, its
blocks are copied into own blocks at once.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from baton.errors import NodeFailed, OutOfBlocks, Preempted
from baton.types import AttemptKey, BlockIndex, TicketId
from node_engine.core.blocks.block_ownership import BlockLedgerError
from node_engine.core.blocks.block_pool import BlockPool, PrefixMatch
from node_engine.core.blocks.pool_prefix import RefCountedPin
from node_engine.core.scheduling.preemption import PreemptionPolicy, select_victim
from node_engine.core.sequences.outcomes import PrefillRequeued, SequenceFailed, SequenceOutcome
from node_engine.core.sequences.sequence import (
    Sequence,
    SequenceState,
    SequenceTable,
    handoff_owner_label,
)
from node_engine.core.step.step_batch import SequenceId

WAITING, PREFILLING, HANDING_OFF = (
    SequenceState.WAITING,
    SequenceState.PREFILLING,
    SequenceState.HANDING_OFF,
)
RUNNING, AWAITING_KV, FINISHED = (
    SequenceState.RUNNING,
    SequenceState.AWAITING_KV,
    SequenceState.FINISHED,
)


# Copies whole blocks: pairs of source and destination.
CopyBlocks = Callable[[SequenceOf[tuple[BlockIndex, BlockIndex]]], None]


@dataclass(frozen=True, slots=True)
class CapacityRefusal:
    """Why a sequence cannot be admitted now; nothing was reserved for it."""

    needed_blocks: int
    free_blocks: int
    free_slots: int  # room for sequences that compute


class KVCacheManager:
    """Gives blocks to sequences and takes them back; collects the outcomes of preemptions."""

    def __init__(
        self,
        pool: BlockPool,
        table: SequenceTable,
        max_num_seqs: int,
        preemption_policy: PreemptionPolicy,
        copy_pool_blocks: CopyBlocks | None = None,
    ) -> None:
        """`copy_pool_blocks` copies pool blocks into own ones; None: they are read in place."""
        self.outcomes: list[SequenceOutcome] = []
        self._copy_pool_blocks = copy_pool_blocks
        self._block_pool = pool
        self._sequences = table
        self._max_num_seqs = max_num_seqs
        self._preemption_policy = preemption_policy
        self._sequences_in_flight: frozenset[SequenceId] = frozenset()
        self._deferred_releases: list[tuple[str, list[BlockIndex], list[RefCountedPin]]] = []
        self._requeued: set[AttemptKey] = set()  # their senders may still hold blocks

    # queries

    @property
    def free_slots(self) -> int:
        """How many more sequences may compute or await KV."""
        taken = sum(
            len(self._sequences.get_by_state(state)) for state in (PREFILLING, RUNNING, AWAITING_KV)
        )
        return max(0, self._max_num_seqs - taken)

    @property
    def free_blocks(self) -> int:
        """Blocks for new work; one per running sequence is kept back, so that it can grow."""
        return max(
            0, self._block_pool.num_available_blocks - len(self._sequences.get_by_state(RUNNING))
        )

    @property
    def unclaimed_slots(self) -> int:
        """`free_slots` minus those for entitled WAITING sequences (local or ticketed prefills)."""
        return max(0, self.free_slots - len(self._list_entitled_waiting()))

    @property
    def unclaimed_blocks(self) -> int:
        """`free_blocks` minus those that entitled WAITING sequences may need."""
        return max(
            0,
            self.free_blocks
            - sum(
                self.count_blocks_for(sequence.context_len)
                for sequence in self._list_entitled_waiting()
            ),
        )

    @property
    def releasing_blocks(self) -> int:
        """Blocks of requeued prefills that their senders still read; they become free soon."""
        self._requeued = {
            key
            for key in self._requeued
            if self._block_pool.count_blocks_held_by(handoff_owner_label(key))
        }
        return sum(
            self._block_pool.count_blocks_held_by(handoff_owner_label(key))
            for key in self._requeued
        )

    def pop_outcomes(self) -> list[SequenceOutcome]:
        outcomes, self.outcomes = self.outcomes, []
        return outcomes

    def estimate_admission(self, sequence: Sequence) -> tuple[int, CapacityRefusal | None]:
        """Missing tokens of the context, and why it cannot be admitted now. Changes nothing."""
        match = self._match_prefix(sequence)
        needed = self.count_blocks_for(sequence.context_len) - self._count_ready_blocks(match)
        fits = self.unclaimed_slots > 0 and needed <= self.unclaimed_blocks
        refusal = (
            None if fits else CapacityRefusal(needed, self.unclaimed_blocks, self.unclaimed_slots)
        )
        partial = (match.partial_hit.source_block,) if match.partial_hit else ()
        self._block_pool.release_blocks((*match.blocks, *partial), sequence.owner)
        return sequence.context_len - match.num_tokens, refusal

    # blocks for a sequence

    def count_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_pool.block_size)

    def admit_sequence(self, sequence: Sequence) -> bool:
        """Give a WAITING sequence all blocks of its context and reuse its cached prefix.

        Returns False if there are too few blocks now.
        """
        match = self._match_prefix(sequence)
        needed = self.count_blocks_for(sequence.context_len) - self._count_ready_blocks(match)
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
        self._requeued.discard(sequence.key)
        fresh = self._start_block_table(
            sequence, replace(match, partial_hit=partial, num_tokens=covered), fresh
        )
        sequence.block_table.extend(fresh)
        if partial:
            self._copy_partial_block(sequence, partial.source_block, fresh[0])
        self._keep_pool_pin(sequence)
        self._sequences.change_state(sequence, PREFILLING)
        return True

    def reserve_for_handoff(self, sequence: Sequence, ticket: TicketId) -> CapacityRefusal | None:
        """Match the cached prefix of a new sequence and reserve the rest for a KV writer.

        Never waits, and takes no blocks that WAITING sequences are entitled to.
        """
        slots, limit = self.unclaimed_slots, self.unclaimed_blocks
        match = self._match_prefix(sequence, allow_partial=False)
        needed = self.count_blocks_for(sequence.context_len) - self._count_ready_blocks(match)
        limit = min(limit, self.free_blocks)  # matched blocks can no longer be evicted
        lacking = self.count_blocks_for(sequence.context_len) - len(match.blocks)
        reserved = (
            self._block_pool.reserve_for_ticket(lacking, ticket, sequence.owner)
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
        sequence.block_table.extend(self._block_pool.commit_ticket(sequence.ticket_id))
        sequence.ticket_id, sequence.reserved_blocks = None, ()
        sequence.num_computed_tokens = num_computed
        self.index_full_blocks(sequence)

    def index_full_blocks(self, sequence: Sequence) -> None:
        """Index the blocks that have become full, and the partly filled end of the context.

        Other choices of the same prompt can then reuse the whole context.
        """
        size = self._block_pool.block_size
        for number in range(sequence.num_indexed_blocks, sequence.num_computed_tokens // size):
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
        if self.count_blocks_for(sequence.num_computed_tokens + 1) <= len(sequence.block_table):
            return True
        while (fresh := self._block_pool.allocate_blocks(1, sequence.owner)) is None:
            if self.releasing_blocks:
                return False
            if (victim := self._find_newest_unticketed()) is not None:
                self.requeue_prefill(victim, sequence)
            elif (
                victim := select_victim(sequence, self._list_preemptible(), self._preemption_policy)
            ) is not sequence:
                self._fail_sequence(
                    victim,
                    Preempted(f"{victim.key} gave its blocks to other work"),
                    sequence.tenant_class,
                )
            else:
                return self._on_no_victim(sequence)
        sequence.block_table.extend(fresh)
        return True

    def _on_no_victim(self, sequence: Sequence) -> bool:
        """`sequence` is its own victim: preempt it, fail it, or wait for blocks to be released."""
        held, total = sequence.num_own_blocks, self._block_pool.num_blocks
        if held >= total:
            message = (
                f"{sequence.key} needs {held + 1} blocks, the cache has {total}: raise --kv-memory"
            )
            self._fail_sequence(sequence, OutOfBlocks(message))
        elif others := [other for other in self._list_preemptible() if other is not sequence]:
            lowest = max(others, key=lambda other: other.priority_level)
            above = lowest.tenant_class if lowest.priority_level < sequence.priority_level else ""
            self._fail_sequence(
                sequence, Preempted(f"{sequence.key} gave its blocks to other work"), above
            )
        return False

    # releasing blocks

    def requeue_prefill(self, sequence: Sequence, taker: Sequence) -> None:
        """Take the blocks of `sequence`, which `taker` needs; it is WAITING and starts over."""
        self._give_blocks_back(sequence)
        sequence.restart_prefill(
            taker.tenant_class if taker.priority_level < sequence.priority_level else ""
        )
        self._sequences.change_state(sequence, WAITING)
        self._requeued.add(sequence.key)
        self.outcomes.append(PrefillRequeued(sequence))

    def finish_sequence(self, sequence: Sequence) -> None:
        """End a sequence in any state and release its blocks and pins."""
        self._give_blocks_back(sequence)
        sequence.set_pool_prefix(None)
        self._sequences.change_state(sequence, FINISHED)

    def on_step_begin(self, computing: frozenset[SequenceId]) -> None:
        """Until `on_step_end` the engine may write blocks of these sequences."""
        self._sequences_in_flight = computing

    def on_step_end(self) -> None:
        """Release the blocks of sequences that ended during the step."""
        self._sequences_in_flight = frozenset()
        for owner, blocks, pins in self._deferred_releases:
            self._release_references(owner, blocks, pins)
        self._deferred_releases.clear()

    def on_copy_done(self, sequence: Sequence) -> None:
        """The step has made the sequence's copy on write: release the source block."""
        if sequence.pending_copy is not None:
            self._block_pool.release_blocks((sequence.pending_copy[0],), sequence.owner)
            sequence.pending_copy = None

    # the shared pool

    def _match_prefix(self, sequence: Sequence, *, allow_partial: bool = True) -> PrefixMatch:
        """Match the context in own cache and pool; own blocks and the longer partial hit win."""
        pool_prefix, limit = sequence.pool_prefix, sequence.num_reusable_tokens
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

    def _count_ready_blocks(self, match: PrefixMatch) -> int:
        """Number of matched blocks that can be read where they are."""
        return len(match.blocks) - (
            self._count_pool_blocks(match.blocks) if self._copy_pool_blocks else 0
        )

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
        reads = sequence.num_pool_blocks or (
            sequence.pending_copy is not None
            and not self._block_pool.is_own_block(sequence.pending_copy[0])
        )
        if sequence.pool_prefix and reads:
            sequence.pool_pins.append(sequence.pool_prefix.pin.acquire())
        sequence.set_pool_prefix(None)

    # helpers

    def _start_block_table(
        self, sequence: Sequence, match: PrefixMatch, fresh: tuple[BlockIndex, ...]
    ) -> tuple[BlockIndex, ...]:
        """Begin the block table with the matched blocks. Returns the unused blocks of `fresh`."""
        table, size = list(match.blocks), self._block_pool.block_size
        num_pool_blocks = self._count_pool_blocks(match.blocks)
        from_pool = match.partial_hit is not None and not self._block_pool.is_own_block(
            match.partial_hit.source_block
        )
        sequence.num_pool_tokens = num_pool_blocks * size + (
            match.partial_hit.num_tokens if match.partial_hit and from_pool else 0
        )
        num_remote = sequence.pool_prefix.num_remote_blocks if sequence.pool_prefix else 0
        sequence.num_remote_pool_tokens = min(num_pool_blocks, num_remote) * size
        if self._copy_pool_blocks and num_pool_blocks:
            places = [
                number
                for number, block in enumerate(table)
                if not self._block_pool.is_own_block(block)
            ]
            copies = fresh[:num_pool_blocks]
            self._copy_pool_blocks(
                [(table[number], copy) for number, copy in zip(places, copies, strict=True)]
            )
            for number, copy in zip(places, copies, strict=True):
                table[number] = copy
                self._block_pool.index_block(copy, sequence.chain, number)
            fresh, num_pool_blocks = fresh[num_pool_blocks:], 0
        sequence.block_table, sequence.num_pool_blocks = table, num_pool_blocks
        sequence.num_indexed_blocks = len(table)
        sequence.num_cached_tokens = sequence.num_computed_tokens = match.num_tokens
        return fresh

    def _list_entitled_waiting(self) -> list[Sequence]:
        return [
            sequence
            for sequence in self._sequences.get_by_state(WAITING).values()
            if not sequence.is_unticketed
        ]

    def _allocate_blocks(self, sequence: Sequence, needed: int) -> tuple[BlockIndex, ...] | None:
        if not sequence.is_unticketed:
            self._requeue_unticketed(sequence, needed)
        return (
            self._block_pool.allocate_blocks(needed, sequence.owner)
            if needed <= self.free_blocks
            else None
        )

    def _requeue_unticketed(self, taker: Sequence, needed: int) -> None:
        """Requeue as many unticketed prefills as needed for `taker` to get `needed` blocks.

        Some blocks may become free only when senders release them. Does nothing if all unticketed
        prefills together would not be enough.
        """
        room = self.free_blocks + self.releasing_blocks
        victims = [
            victim for state in (PREFILLING, HANDING_OFF) for victim in self._list_unticketed(state)
        ]
        if needed > room + sum(victim.num_own_blocks for victim in victims):
            return
        victims.sort(key=lambda victim: (victim.priority_level, victim.id), reverse=True)
        for victim in victims:
            if needed <= room:
                return
            self.requeue_prefill(victim, taker)
            room = self.free_blocks + self.releasing_blocks

    def _list_unticketed(self, state: SequenceState) -> list[Sequence]:
        return [
            sequence
            for sequence in self._sequences.get_by_state(state).values()
            if sequence.is_unticketed
        ]

    def _find_newest_unticketed(self) -> Sequence | None:
        victims = (*self._list_unticketed(PREFILLING), *self._list_unticketed(HANDING_OFF))
        return max(victims, key=lambda victim: (victim.priority_level, victim.id), default=None)

    def _list_preemptible(self) -> list[Sequence]:
        local = (
            sequence
            for sequence in self._sequences.get_by_state(PREFILLING).values()
            if not sequence.is_prefill_only
        )
        return [*self._sequences.get_by_state(RUNNING).values(), *local]

    def _fail_sequence(self, sequence: Sequence, error: NodeFailed, caused_by: str = "") -> None:
        self.finish_sequence(sequence)
        self.outcomes.append(SequenceFailed(sequence, error, caused_by))

    def _give_blocks_back(self, sequence: Sequence) -> None:
        blocks = sequence.block_table
        if sequence.pending_copy is not None:
            blocks = [*blocks, sequence.pending_copy[0]]
        pins, sequence.pool_pins = sequence.pool_pins, []
        sequence.block_table, sequence.pending_copy, sequence.num_pool_blocks = [], None, 0
        if sequence.id in self._sequences_in_flight:
            self._deferred_releases.append((sequence.owner, blocks, pins))
        else:
            self._release_references(sequence.owner, blocks, pins)

    def _release_references(
        self, owner: str, blocks: list[BlockIndex], pins: list[RefCountedPin]
    ) -> None:
        self._block_pool.release_blocks(blocks, owner)
        for pin in pins:
            pin.release()
