"""Which sequences have blocks: admission with prefix reuse, growth, and who gives way when blocks
run out.

When a block is missing, speculative prefills (no ticket yet) give theirs first, the lowest class
and then the newest first, and wait again; then a running or locally prefilling sequence is
preempted (victims.py says which). Blocks under a ticket or read by a sender are never taken; they
come back by themselves, and whoever needs them waits.

What the host's shared pool has of a context stands in the block table beside own blocks, and the
sequence holds the pool's pin for as long (pooled.py). Where kernels cannot read there, it is copied
into own blocks at once.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from baton.errors import NodeFailed, OutOfBlocks, Preempted
from baton.types import AttemptKey, BlockIndex, TicketId
from node_engine.core.blocks.block_ledger import BlockLedgerError
from node_engine.core.blocks.block_pool import BlockPool, PrefixMatch
from node_engine.core.blocks.pool_prefix import RefCountedPin
from node_engine.core.scheduling.preemption import PreemptionPolicy, select_victim
from node_engine.core.sequences.outcomes import PrefillRequeued, SequenceFailed, SequenceOutcome
from node_engine.core.sequences.sequence import Sequence, SequenceState, handoff_owner_label
from node_engine.core.sequences.sequence_table import SequenceTable
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


CopyBlocks = Callable[
    [SequenceOf[tuple[BlockIndex, BlockIndex]]], None
]  # whole blocks: source, destination


@dataclass(frozen=True, slots=True)
class CapacityRefusal:
    """Nothing was reserved: blocks needed, blocks to be had, and free places for sequences."""

    needed_blocks: int
    free_blocks: int
    free_slots: int


class KVCacheManager:
    """Blocks given to sequences and taken back. `outcomes` collects what happened to those that
    gave way."""

    def __init__(
        self,
        pool: BlockPool,
        table: SequenceTable,
        max_num_seqs: int,
        victims: PreemptionPolicy,
        copy_in: CopyBlocks | None = None,
    ) -> None:
        """`copy_in` copies blocks of the shared pool into own ones, at once; None: they are read
        where they are."""
        self.outcomes: list[SequenceOutcome] = []
        self._copy_pool_blocks = copy_in
        self._block_pool = pool
        self._sequences = table
        self._max_num_seqs = max_num_seqs
        self._preemption_policy = victims
        self._sequences_in_flight: frozenset[SequenceId] = frozenset()
        self._deferred_releases: list[tuple[str, list[BlockIndex], list[RefCountedPin]]] = []
        self._requeued: set[AttemptKey] = set()  # whose senders may still hold blocks

    # what there is

    @property
    def free_slots(self) -> int:
        """Places for sequences that compute or are about to."""
        taken = sum(
            len(self._sequences.get_by_state(state)) for state in (PREFILLING, RUNNING, AWAITING_KV)
        )
        return max(0, self._max_num_seqs - taken)

    @property
    def free_blocks(self) -> int:
        """Blocks for new work: one is kept back for each running sequence, so that admission does
        not preempt."""
        return max(
            0, self._block_pool.num_available_blocks - len(self._sequences.get_by_state(RUNNING))
        )

    @property
    def unclaimed_slots(self) -> int:
        """`free_slots` without those that firm WAITING sequences are entitled to."""
        return max(0, self.free_slots - len(self._list_entitled_waiting()))

    @property
    def unclaimed_blocks(self) -> int:
        """`free_blocks` without what firm WAITING sequences may need."""
        return max(
            0,
            self.free_blocks
            - sum(
                self.count_blocks_for(each.context_len) for each in self._list_entitled_waiting()
            ),
        )

    @property
    def releasing_blocks(self) -> int:
        """Blocks of dropped sequences that their senders have yet to let go: nobody else need give
        way for them."""
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
        taken, self.outcomes = self.outcomes, []
        return taken

    def estimate_admission(self, sequence: Sequence) -> tuple[int, CapacityRefusal | None]:
        """Tokens of the context that are not here, and why it cannot be admitted now. Nothing is
        kept."""
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
        """Give a WAITING sequence every block of its context; the prefix that is here already is
        not computed again."""
        match = self._match_prefix(sequence)
        needed = self.count_blocks_for(sequence.context_len) - self._count_ready_blocks(match)
        fresh = self._allocate_blocks(sequence, needed)
        covered, partial = match.num_tokens, match.partial_hit
        if (
            partial and fresh is None and self._block_pool.is_own_block(partial.source_block)
        ):  # the reference on it may be what is missing
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
        """Match the prefix that is here and reserve the rest of a new sequence's context for
        another node to write. Never waits, and takes nothing that waiting sequences are entitled
        to."""
        slots, limit = self.unclaimed_slots, self.unclaimed_blocks
        match = self._match_prefix(sequence, allow_partial=False)
        needed = self.count_blocks_for(sequence.context_len) - self._count_ready_blocks(match)
        limit = min(limit, self.free_blocks)  # what was matched is not to be had any more
        lacking = self.count_blocks_for(sequence.context_len) - len(match.blocks)
        promised = (
            self._block_pool.reserve_for_ticket(lacking, ticket, sequence.owner)
            if slots and needed <= limit
            else None
        )
        if promised is None:
            self._block_pool.release_blocks(match.blocks, sequence.owner)
            return CapacityRefusal(needed, limit, slots)
        sequence.ticket_id, sequence.reserved_blocks = ticket, promised
        self._start_block_table(
            sequence,
            match,
            self._block_pool.allocate_blocks(needed - lacking, sequence.owner) or (),
        )
        self._keep_pool_pin(sequence)
        return None

    def commit_handoff(self, sequence: Sequence, num_computed: int) -> None:
        """What was promised has been written: KV of `num_computed` tokens is here."""
        if sequence.ticket_id is None:
            raise BlockLedgerError(f"sequence {sequence.key} has no ticket")
        sequence.block_table.extend(self._block_pool.commit_ticket(sequence.ticket_id))
        sequence.ticket_id, sequence.reserved_blocks = None, ()
        sequence.num_computed_tokens = num_computed
        self.index_full_blocks(sequence)

    def index_full_blocks(self, sequence: Sequence) -> None:
        """Make every block that has become full findable, and the end of the context in a block
        that has not: another choice of the same prompt then finds all of it."""
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
        """Make room for the KV of a RUNNING sequence's next token. False if it waits, or is no
        more."""
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
        """Nobody else gives way to `sequence`: others go on instead, or what is pinned comes
        back."""
        held, total = sequence.num_own_blocks, self._block_pool.num_blocks
        if held >= total:
            message = (
                f"{sequence.key} needs {held + 1} blocks, the cache has {total}: raise --kv-memory"
            )
            self._fail_sequence(sequence, OutOfBlocks(message))
        elif others := [each for each in self._list_preemptible() if each is not sequence]:
            lowest = max(others, key=lambda each: each.priority_level)
            above = lowest.tenant_class if lowest.priority_level < sequence.priority_level else ""
            self._fail_sequence(
                sequence, Preempted(f"{sequence.key} gave its blocks to other work"), above
            )
        return False

    # blocks back

    def requeue_prefill(self, sequence: Sequence, taker: Sequence) -> None:
        """Back to WAITING without blocks, which `taker` needs: prefill starts over."""
        self._give_blocks_back(sequence)
        sequence.restart_prefill(
            taker.tenant_class if taker.priority_level < sequence.priority_level else ""
        )
        self._sequences.change_state(sequence, WAITING)
        self._requeued.add(sequence.key)
        self.outcomes.append(PrefillRequeued(sequence))

    def finish_sequence(self, sequence: Sequence) -> None:
        self._give_blocks_back(sequence)
        sequence.set_pool_prefix(None)
        self._sequences.change_state(sequence, FINISHED)

    def on_step_begin(self, computing: frozenset[SequenceId]) -> None:
        """Blocks of these sequences are being written until `on_step_end`."""
        self._sequences_in_flight = computing

    def on_step_end(self) -> None:
        self._sequences_in_flight = frozenset()
        for owner, blocks, holds in self._deferred_releases:
            self._release_references(owner, blocks, holds)
        self._deferred_releases.clear()

    def on_copy_done(self, sequence: Sequence) -> None:
        if sequence.pending_copy is not None:
            self._block_pool.release_blocks((sequence.pending_copy[0],), sequence.owner)
            sequence.pending_copy = None

    # the shared pool

    def _match_prefix(self, sequence: Sequence, *, allow_partial: bool = True) -> PrefixMatch:
        """What own cache and pool have of the context: own blocks first, and the partial block that
        is longer."""
        pooled, limit = sequence.pool_prefix, sequence.num_reusable_tokens
        known = pooled.blocks if pooled else ()
        match = self._block_pool.match_prefix(
            sequence.chain, limit, sequence.owner, allow_partial=allow_partial, pooled=known
        )
        theirs = (
            pooled.partial_hit
            if pooled and allow_partial and len(match.blocks) == len(known)
            else None
        )
        mine = match.partial_hit
        if theirs is None or (mine is not None and mine.num_tokens >= theirs.num_tokens):
            return match
        if mine is not None:
            self._block_pool.release_blocks((mine.source_block,), sequence.owner)
        return PrefixMatch(
            match.blocks,
            theirs,
            len(match.blocks) * self._block_pool.block_size + theirs.num_tokens,
        )

    def _count_pool_blocks(self, blocks: SequenceOf[BlockIndex]) -> int:
        return sum(not self._block_pool.is_own_block(block) for block in blocks)

    def _count_ready_blocks(self, match: PrefixMatch) -> int:
        """Blocks of a match for which no own one is needed."""
        return len(match.blocks) - (
            self._count_pool_blocks(match.blocks) if self._copy_pool_blocks else 0
        )

    def _copy_partial_block(
        self, sequence: Sequence, source: BlockIndex, block: BlockIndex
    ) -> None:
        """`block` begins as a copy of `source`, on write or, from where kernels cannot read, at
        once."""
        if self._copy_pool_blocks and not self._block_pool.is_own_block(source):
            self._copy_pool_blocks([(source, block)])
        else:
            sequence.pending_copy = (source, block)

    def _keep_pool_pin(self, sequence: Sequence) -> None:
        """Blocks are given: keep the pool's pin if they are read through it."""
        reads = sequence.num_pool_blocks or (
            sequence.pending_copy is not None
            and not self._block_pool.is_own_block(sequence.pending_copy[0])
        )
        if sequence.pool_prefix and reads:
            sequence.pool_pins.append(sequence.pool_prefix.pin.acquire())
        sequence.set_pool_prefix(None)

    # the steps underneath

    def _start_block_table(
        self, sequence: Sequence, match: PrefixMatch, fresh: tuple[BlockIndex, ...]
    ) -> tuple[BlockIndex, ...]:
        """Begin the table with what was matched. Returns what is left of `fresh`."""
        table, borrowed, size = (
            list(match.blocks),
            self._count_pool_blocks(match.blocks),
            self._block_pool.block_size,
        )
        from_pool = match.partial_hit is not None and not self._block_pool.is_own_block(
            match.partial_hit.source_block
        )
        sequence.num_pool_tokens = borrowed * size + (
            match.partial_hit.num_tokens if match.partial_hit and from_pool else 0
        )
        sequence.num_remote_pool_tokens = (
            min(borrowed, sequence.pool_prefix.num_remote_blocks if sequence.pool_prefix else 0)
            * size
        )
        if self._copy_pool_blocks and borrowed:
            places = [
                number
                for number, block in enumerate(table)
                if not self._block_pool.is_own_block(block)
            ]
            pairs = [
                (table[number], mine) for number, mine in zip(places, fresh[:borrowed], strict=True)
            ]
            self._copy_pool_blocks(pairs)
            for number, (_, mine) in zip(places, pairs, strict=True):
                table[number] = mine
                self._block_pool.index_block(mine, sequence.chain, number)
            fresh, borrowed = fresh[borrowed:], 0
        sequence.block_table, sequence.num_pool_blocks = table, borrowed
        sequence.num_indexed_blocks = len(table)
        sequence.num_cached_tokens = sequence.num_computed_tokens = match.num_tokens
        return fresh

    def _list_entitled_waiting(self) -> list[Sequence]:
        return [
            each
            for each in self._sequences.get_by_state(WAITING).values()
            if not each.is_unticketed
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
        """Drop what it takes to get `needed` blocks for `taker`, at once or when senders let go of
        them; nothing if that would not be enough."""
        room = self.free_blocks + self.releasing_blocks
        victims = [
            each for state in (PREFILLING, HANDING_OFF) for each in self._list_unticketed(state)
        ]
        if needed > room + sum(victim.num_own_blocks for victim in victims):
            return
        for victim in sorted(
            victims, key=lambda each: (each.priority_level, each.id), reverse=True
        ):
            if needed <= room:
                return
            self.requeue_prefill(victim, taker)
            room = self.free_blocks + self.releasing_blocks

    def _list_unticketed(self, state: SequenceState) -> list[Sequence]:
        return [each for each in self._sequences.get_by_state(state).values() if each.is_unticketed]

    def _find_newest_unticketed(self) -> Sequence | None:
        victims = (*self._list_unticketed(PREFILLING), *self._list_unticketed(HANDING_OFF))
        return max(victims, key=lambda each: (each.priority_level, each.id), default=None)

    def _list_preemptible(self) -> list[Sequence]:
        local = (
            each
            for each in self._sequences.get_by_state(PREFILLING).values()
            if not each.is_prefill_only
        )
        return [*self._sequences.get_by_state(RUNNING).values(), *local]

    def _fail_sequence(self, sequence: Sequence, error: NodeFailed, caused_by: str = "") -> None:
        self.finish_sequence(sequence)
        self.outcomes.append(SequenceFailed(sequence, error, caused_by))

    def _give_blocks_back(self, sequence: Sequence) -> None:
        blocks = sequence.block_table
        if sequence.pending_copy is not None:
            blocks = [*blocks, sequence.pending_copy[0]]
        holds, sequence.pool_pins = sequence.pool_pins, []
        sequence.block_table, sequence.pending_copy, sequence.num_pool_blocks = [], None, 0
        if sequence.id in self._sequences_in_flight:
            self._deferred_releases.append((sequence.owner, blocks, holds))
        else:
            self._release_references(sequence.owner, blocks, holds)

    def _release_references(
        self, owner: str, blocks: list[BlockIndex], holds: list[RefCountedPin]
    ) -> None:
        self._block_pool.release_blocks(blocks, owner)
        for hold in holds:
            hold.release()
