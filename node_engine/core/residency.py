"""Which sequences have blocks: admission with prefix reuse, growth, and who gives way when blocks run out.

When a block is missing, speculative prefills (no ticket yet) give theirs first, the lowest class and then the newest
first, and wait again; then a running or locally prefilling sequence is preempted (victims.py says which). Blocks under
a ticket or read by a sender are never taken; they come back by themselves, and whoever needs them waits.
"""

from dataclasses import dataclass

from baton.errors import NodeFailed, OutOfBlocks, Preempted
from baton.types import AttemptKey, BlockIndex, TicketId
from node_engine.core.block_pool import BlockPool
from node_engine.core.ledger import LedgerError
from node_engine.core.outcome import Dropped, Failed, Outcome
from node_engine.core.sequence import Sequence, SequenceState, pin_label
from node_engine.core.sequence_table import SequenceTable
from node_engine.core.step import SequenceId
from node_engine.core.victims import VictimPolicy, victim_for

WAITING, PREFILLING, HANDING_OFF = SequenceState.WAITING, SequenceState.PREFILLING, SequenceState.HANDING_OFF
RUNNING, AWAITING_KV, FINISHED = SequenceState.RUNNING, SequenceState.AWAITING_KV, SequenceState.FINISHED


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nothing was reserved: blocks needed, blocks to be had, and free places for sequences."""

    needed_blocks: int
    free_blocks: int
    free_slots: int


class Residency:
    """Blocks given to sequences and taken back. `outcomes` collects what happened to those that gave way."""

    def __init__(self, pool: BlockPool, table: SequenceTable, max_num_seqs: int, victims: VictimPolicy) -> None:
        self.outcomes: list[Outcome] = []
        self._pool = pool
        self._table = table
        self._max_num_seqs = max_num_seqs
        self._victims = victims
        self._computing: frozenset[SequenceId] = frozenset()
        self._returning: list[tuple[str, list[BlockIndex]]] = []
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
        match = self._pool.match_prefix(sequence.chain, sequence.reusable_tokens, sequence.owner)
        needed = self.blocks_for(sequence.context_len) - len(match.blocks)
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
        match = self._pool.match_prefix(sequence.chain, sequence.reusable_tokens, sequence.owner)
        needed = self.blocks_for(sequence.context_len) - len(match.blocks)
        fresh = self._allocate(sequence, needed)
        covered, partial = match.num_tokens, match.partial
        if partial and fresh is None:  # the reference on the source may be what is missing
            self._pool.release((partial.source,), sequence.owner)
            covered, partial = covered - partial.num_tokens, None
            fresh = self._allocate(sequence, needed)
        if fresh is None:
            self._pool.release(match.blocks, sequence.owner)
            return False
        self._dropped.discard(sequence.key)
        self._start_with(sequence, match.blocks, covered)
        sequence.block_table.extend(fresh)
        sequence.copy = (partial.source, fresh[0]) if partial else None
        self._table.move(sequence, PREFILLING)
        return True

    def reserve(self, sequence: Sequence, ticket: TicketId) -> Refusal | None:
        """Match the prefix that is here and reserve the rest of a new sequence's context for another node to write.
        Never waits, and takes nothing that waiting sequences are entitled to."""
        slots, limit = self.unclaimed_slots, self.unclaimed_blocks
        match = self._pool.match_prefix(sequence.chain, sequence.reusable_tokens, sequence.owner, allow_partial=False)
        needed = self.blocks_for(sequence.context_len) - len(match.blocks)
        limit = min(limit, self.free_blocks)  # what was matched is not to be had any more
        promised = self._pool.reserve(needed, ticket, sequence.owner) if slots and needed <= limit else None
        if promised is None:
            self._pool.release(match.blocks, sequence.owner)
            return Refusal(needed, limit, slots)
        sequence.ticket, sequence.promised = ticket, promised
        self._start_with(sequence, match.blocks, match.num_tokens)
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
        held, total = len(sequence.block_table), self._pool.total
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
        self._table.move(sequence, FINISHED)

    def step_begins(self, computing: frozenset[SequenceId]) -> None:
        """Blocks of these sequences are being written until `step_ended`."""
        self._computing = computing

    def step_ended(self) -> None:
        self._computing = frozenset()
        for owner, blocks in self._returning:
            self._pool.release(blocks, owner)
        self._returning.clear()

    def copy_done(self, sequence: Sequence) -> None:
        if sequence.copy is not None:
            self._pool.release((sequence.copy[0],), sequence.owner)
            sequence.copy = None

    # the steps underneath

    @staticmethod
    def _start_with(sequence: Sequence, matched: tuple[BlockIndex, ...], covered: int) -> None:
        sequence.block_table = list(matched)
        sequence.num_sealed = len(matched)
        sequence.num_cached = sequence.num_computed = covered

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
        if needed > room + sum(len(victim.block_table) for victim in victims):
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
        sequence.block_table, sequence.copy = [], None
        if sequence.id in self._computing:
            self._returning.append((sequence.owner, blocks))
        else:
            self._pool.release(blocks, sequence.owner)
