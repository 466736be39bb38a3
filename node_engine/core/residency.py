"""Which sequences have blocks: admission with prefix reuse, growth, and who gives way when blocks run out.

When a block is missing, speculative prefills (no ticket yet) give theirs first, the lowest class and then the newest
first, and wait again; then a running or locally prefilling sequence is preempted (victims.py says which). Blocks under
a ticket or read by a sender are never taken; they come back by themselves, and whoever needs them waits.

What the host's shared pool has of a context stands in the block table beside own blocks, and the sequence holds the
pool's pin for as long (pooled.py). Where kernels cannot read there, it is copied into own blocks at once.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from baton.errors import NodeFailed, OutOfBlocks, Preempted
from baton.types import AttemptKey, BlockIndex, TicketId
from node_engine.core.block_pool import BlockPool, PrefixMatch
from node_engine.core.ledger import LedgerError
from node_engine.core.outcome import Dropped, Failed, Outcome
from node_engine.core.pooled import PoolHold
from node_engine.core.sequence import Sequence, SequenceState, pin_label
from node_engine.core.sequence_table import SequenceTable
from node_engine.core.step import SequenceId
from node_engine.core.victims import VictimPolicy, victim_for

WAITING, PREFILLING, HANDING_OFF = SequenceState.WAITING, SequenceState.PREFILLING, SequenceState.HANDING_OFF
RUNNING, AWAITING_KV, FINISHED = SequenceState.RUNNING, SequenceState.AWAITING_KV, SequenceState.FINISHED


CopyBlocks = Callable[[SequenceOf[tuple[BlockIndex, BlockIndex]]], None]  # whole blocks: source, destination


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nothing was reserved: blocks needed, blocks to be had, and free places for sequences."""

    needed_blocks: int
    free_blocks: int
    free_slots: int


class Residency:
    """Blocks given to sequences and taken back. `outcomes` collects what happened to those that gave way."""

    def __init__(
        self,
        pool: BlockPool,
        table: SequenceTable,
        max_num_seqs: int,
        victims: VictimPolicy,
        copy_in: CopyBlocks | None = None,
    ) -> None:
        """`copy_in` copies blocks of the shared pool into own ones, at once; None: they are read where they are."""
        self.outcomes: list[Outcome] = []
        self._copy_in = copy_in
        self._pool = pool
        self._table = table
        self._max_num_seqs = max_num_seqs
        self._victims = victims
        self._computing: frozenset[SequenceId] = frozenset()
        self._returning: list[tuple[str, list[BlockIndex], list[PoolHold]]] = []
        self._dropped: set[AttemptKey] = set()  # whose senders may still hold blocks

    # what there is

    @property
    def free_slots(self) -> int:
        """Places for sequences that compute or are about to."""
        taken = sum(len(self._table.within(state)) for state in (PREFILLING, RUNNING, AWAITING_KV))
        return max(0, self._max_num_seqs - taken)

    @property
    def free_blocks(self) -> int:
        """Blocks for new work: one is kept back for each running sequence, so that admission does not preempt."""
        return max(0, self._pool.available - len(self._table.within(RUNNING)))

    @property
    def unclaimed_slots(self) -> int:
        """`free_slots` without those that firm WAITING sequences are entitled to."""
        return max(0, self.free_slots - len(self._waiting_firm()))

    @property
    def unclaimed_blocks(self) -> int:
        """`free_blocks` without what firm WAITING sequences may need."""
        return max(0, self.free_blocks - sum(self.blocks_for(each.context_len) for each in self._waiting_firm()))

    @property
    def coming_blocks(self) -> int:
        """Blocks of dropped sequences that their senders have yet to let go: nobody else need give way for them."""
        self._dropped = {key for key in self._dropped if self._pool.held_by(pin_label(key))}
        return sum(self._pool.held_by(pin_label(key)) for key in self._dropped)

    def take_outcomes(self) -> list[Outcome]:
        taken, self.outcomes = self.outcomes, []
        return taken

    def survey(self, sequence: Sequence) -> tuple[int, Refusal | None]:
        """Tokens of the context that are not here, and why it cannot be admitted now. Nothing is kept."""
        match = self._match(sequence)
        needed = self.blocks_for(sequence.context_len) - self._ready(match)
        fits = self.unclaimed_slots > 0 and needed <= self.unclaimed_blocks
        refusal = None if fits else Refusal(needed, self.unclaimed_blocks, self.unclaimed_slots)
        partial = (match.partial.source,) if match.partial else ()
        self._pool.release((*match.blocks, *partial), sequence.owner)
        return sequence.context_len - match.num_tokens, refusal

    # blocks for a sequence

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)

    def admit(self, sequence: Sequence) -> bool:
        """Give a WAITING sequence every block of its context; the prefix that is here already is not computed
        again."""
        match = self._match(sequence)
        needed = self.blocks_for(sequence.context_len) - self._ready(match)
        fresh = self._allocate(sequence, needed)
        covered, partial = match.num_tokens, match.partial
        if partial and fresh is None and self._pool.owns(partial.source):  # the reference on it may be what is missing
            self._pool.release((partial.source,), sequence.owner)
            covered, partial = covered - partial.num_tokens, None
            fresh = self._allocate(sequence, needed)
        if fresh is None:
            self._pool.release(match.blocks, sequence.owner)
            return False
        self._dropped.discard(sequence.key)
        fresh = self._start_with(sequence, replace(match, partial=partial, num_tokens=covered), fresh)
        sequence.block_table.extend(fresh)
        if partial:
            self._continue_in(sequence, partial.source, fresh[0])
        self._pin(sequence)
        self._table.move(sequence, PREFILLING)
        return True

    def reserve(self, sequence: Sequence, ticket: TicketId) -> Refusal | None:
        """Match the prefix that is here and reserve the rest of a new sequence's context for another node to write.
        Never waits, and takes nothing that waiting sequences are entitled to."""
        slots, limit = self.unclaimed_slots, self.unclaimed_blocks
        match = self._match(sequence, allow_partial=False)
        needed = self.blocks_for(sequence.context_len) - self._ready(match)
        limit = min(limit, self.free_blocks)  # what was matched is not to be had any more
        lacking = self.blocks_for(sequence.context_len) - len(match.blocks)
        promised = self._pool.reserve(lacking, ticket, sequence.owner) if slots and needed <= limit else None
        if promised is None:
            self._pool.release(match.blocks, sequence.owner)
            return Refusal(needed, limit, slots)
        sequence.ticket, sequence.promised = ticket, promised
        self._start_with(sequence, match, self._pool.allocate(needed - lacking, sequence.owner) or ())
        self._pin(sequence)
        return None

    def commit(self, sequence: Sequence, num_computed: int) -> None:
        """What was promised has been written: KV of `num_computed` tokens is here."""
        if sequence.ticket is None:
            raise LedgerError(f"sequence {sequence.key} has no ticket")
        sequence.block_table.extend(self._pool.commit(sequence.ticket))
        sequence.ticket, sequence.promised = None, ()
        sequence.num_computed = num_computed
        self.seal(sequence)

    def seal(self, sequence: Sequence) -> None:
        """Make every block that has become full findable, and the end of the context in a block that has not: another
        choice of the same prompt then finds all of it."""
        size = self._pool.block_size
        for number in range(sequence.num_sealed, sequence.num_computed // size):
            self._pool.seal_block(sequence.block_table[number], sequence.chain, number)
            sequence.num_sealed = number + 1
        if sequence.num_computed == sequence.context_len and sequence.context_len % size:
            number, length = divmod(sequence.context_len, size)
            self._pool.seal_block(sequence.block_table[number], sequence.chain, number, length)

    def grow(self, sequence: Sequence) -> bool:
        """Make room for the KV of a RUNNING sequence's next token. False if it waits, or is no more."""
        if self.blocks_for(sequence.num_computed + 1) <= len(sequence.block_table):
            return True
        while (fresh := self._pool.allocate(1, sequence.owner)) is None:
            if self.coming_blocks:
                return False
            if (victim := self._newest_speculative()) is not None:
                self.drop(victim, sequence)
            elif (victim := victim_for(sequence, self._preemptible(), self._victims)) is not sequence:
                self._fail(victim, Preempted(f"{victim.key} gave its blocks to other work"), sequence.tenant_class)
            else:
                return self._stall(sequence)
        sequence.block_table.extend(fresh)
        return True

    def _stall(self, sequence: Sequence) -> bool:
        """Nobody else gives way to `sequence`: others go on instead, or what is pinned comes back."""
        held, total = sequence.num_own, self._pool.total
        if held >= total:
            message = f"{sequence.key} needs {held + 1} blocks, the cache has {total}: raise --kv-memory"
            self._fail(sequence, OutOfBlocks(message))
        elif others := [each for each in self._preemptible() if each is not sequence]:
            lowest = max(others, key=lambda each: each.level)
            above = lowest.tenant_class if lowest.level < sequence.level else ""
            self._fail(sequence, Preempted(f"{sequence.key} gave its blocks to other work"), above)
        return False

    # blocks back

    def drop(self, sequence: Sequence, taker: Sequence) -> None:
        """Back to WAITING without blocks, which `taker` needs: prefill starts over."""
        self._give_back(sequence)
        sequence.restart(taker.tenant_class if taker.level < sequence.level else "")
        self._table.move(sequence, WAITING)
        self._dropped.add(sequence.key)
        self.outcomes.append(Dropped(sequence))

    def finish(self, sequence: Sequence) -> None:
        self._give_back(sequence)
        sequence.offer(None)
        self._table.move(sequence, FINISHED)

    def step_begins(self, computing: frozenset[SequenceId]) -> None:
        """Blocks of these sequences are being written until `step_ended`."""
        self._computing = computing

    def step_ended(self) -> None:
        self._computing = frozenset()
        for owner, blocks, holds in self._returning:
            self._let_go(owner, blocks, holds)
        self._returning.clear()

    def copy_done(self, sequence: Sequence) -> None:
        if sequence.copy is not None:
            self._pool.release((sequence.copy[0],), sequence.owner)
            sequence.copy = None

    # the shared pool

    def _match(self, sequence: Sequence, *, allow_partial: bool = True) -> PrefixMatch:
        """What own cache and pool have of the context: own blocks first, and the partial block that is longer."""
        pooled, limit = sequence.pooled, sequence.reusable_tokens
        known = pooled.blocks if pooled else ()
        match = self._pool.match_prefix(
            sequence.chain, limit, sequence.owner, allow_partial=allow_partial, pooled=known
        )
        theirs = pooled.partial if pooled and allow_partial and len(match.blocks) == len(known) else None
        mine = match.partial
        if theirs is None or (mine is not None and mine.num_tokens >= theirs.num_tokens):
            return match
        if mine is not None:
            self._pool.release((mine.source,), sequence.owner)
        return PrefixMatch(match.blocks, theirs, len(match.blocks) * self._pool.block_size + theirs.num_tokens)

    def _borrowed(self, blocks: SequenceOf[BlockIndex]) -> int:
        return sum(not self._pool.owns(block) for block in blocks)

    def _ready(self, match: PrefixMatch) -> int:
        """Blocks of a match for which no own one is needed."""
        return len(match.blocks) - (self._borrowed(match.blocks) if self._copy_in else 0)

    def _continue_in(self, sequence: Sequence, source: BlockIndex, block: BlockIndex) -> None:
        """`block` begins as a copy of `source`, on write or, from where kernels cannot read, at once."""
        if self._copy_in and not self._pool.owns(source):
            self._copy_in([(source, block)])
        else:
            sequence.copy = (source, block)

    def _pin(self, sequence: Sequence) -> None:
        """Blocks are given: keep the pool's pin if they are read through it."""
        reads = sequence.num_borrowed or (sequence.copy is not None and not self._pool.owns(sequence.copy[0]))
        if sequence.pooled and reads:
            sequence.holds.append(sequence.pooled.hold.take())
        sequence.offer(None)

    # the steps underneath

    def _start_with(
        self, sequence: Sequence, match: PrefixMatch, fresh: tuple[BlockIndex, ...]
    ) -> tuple[BlockIndex, ...]:
        """Begin the table with what was matched. Returns what is left of `fresh`."""
        table, borrowed, size = list(match.blocks), self._borrowed(match.blocks), self._pool.block_size
        from_pool = match.partial is not None and not self._pool.owns(match.partial.source)
        sequence.num_pooled = borrowed * size + (match.partial.num_tokens if match.partial and from_pool else 0)
        sequence.num_remote = min(borrowed, sequence.pooled.remote if sequence.pooled else 0) * size
        if self._copy_in and borrowed:
            places = [number for number, block in enumerate(table) if not self._pool.owns(block)]
            pairs = [(table[number], mine) for number, mine in zip(places, fresh[:borrowed], strict=True)]
            self._copy_in(pairs)
            for number, (_, mine) in zip(places, pairs, strict=True):
                table[number] = mine
                self._pool.seal_block(mine, sequence.chain, number)
            fresh, borrowed = fresh[borrowed:], 0
        sequence.block_table, sequence.num_borrowed = table, borrowed
        sequence.num_sealed = len(table)
        sequence.num_cached = sequence.num_computed = match.num_tokens
        return fresh

    def _waiting_firm(self) -> list[Sequence]:
        return [each for each in self._table.within(WAITING).values() if not each.speculative]

    def _allocate(self, sequence: Sequence, needed: int) -> tuple[BlockIndex, ...] | None:
        if not sequence.speculative:
            self._drop_speculative(sequence, needed)
        return self._pool.allocate(needed, sequence.owner) if needed <= self.free_blocks else None

    def _drop_speculative(self, taker: Sequence, needed: int) -> None:
        """Drop what it takes to get `needed` blocks for `taker`, at once or when senders let go of them; nothing if
        that would not be enough."""
        room = self.free_blocks + self.coming_blocks
        victims = [each for state in (PREFILLING, HANDING_OFF) for each in self._speculative(state)]
        if needed > room + sum(victim.num_own for victim in victims):
            return
        for victim in sorted(victims, key=lambda each: (each.level, each.id), reverse=True):
            if needed <= room:
                return
            self.drop(victim, taker)
            room = self.free_blocks + self.coming_blocks

    def _speculative(self, state: SequenceState) -> list[Sequence]:
        return [each for each in self._table.within(state).values() if each.speculative]

    def _newest_speculative(self) -> Sequence | None:
        victims = (*self._speculative(PREFILLING), *self._speculative(HANDING_OFF))
        return max(victims, key=lambda each: (each.level, each.id), default=None)

    def _preemptible(self) -> list[Sequence]:
        local = (each for each in self._table.within(PREFILLING).values() if not each.hand_off)
        return [*self._table.within(RUNNING).values(), *local]

    def _fail(self, sequence: Sequence, error: NodeFailed, caused_by: str = "") -> None:
        self.finish(sequence)
        self.outcomes.append(Failed(sequence, error, caused_by))

    def _give_back(self, sequence: Sequence) -> None:
        blocks = sequence.block_table
        if sequence.copy is not None:
            blocks = [*blocks, sequence.copy[0]]
        holds, sequence.holds = sequence.holds, []
        sequence.block_table, sequence.copy, sequence.num_borrowed = [], None, 0
        if sequence.id in self._computing:
            self._returning.append((sequence.owner, blocks, holds))
        else:
            self._let_go(sequence.owner, blocks, holds)

    def _let_go(self, owner: str, blocks: list[BlockIndex], holds: list[PoolHold]) -> None:
        self._pool.release(blocks, owner)
        for hold in holds:
            hold.drop()
