"""Which sequences have blocks: admission with prefix reuse, growth, and who gives way when blocks run out.

When a block is missing, speculative prefills (no ticket yet) give theirs first, newest first, and wait again;
then the newest running or locally prefilling sequence is preempted, which may be the one that asks. Age is
the order of arrival and never changes: the oldest sequence is nobody's victim and goes on, so there is no
livelock. Blocks under a ticket or read by a sender are never taken; they come back by themselves, and whoever
needs them waits.
"""

from baton.errors import NodeFailed, OutOfBlocks, Preempted
from baton.types import BlockIndex
from node_engine.core.block_pool import BlockPool
from node_engine.core.outcome import Dropped, Failed, Outcome
from node_engine.core.sequence import Sequence, SequenceState
from node_engine.core.sequence_table import SequenceTable
from node_engine.core.step import SequenceId

WAITING, PREFILLING, HANDING_OFF = SequenceState.WAITING, SequenceState.PREFILLING, SequenceState.HANDING_OFF
RUNNING, FINISHED = SequenceState.RUNNING, SequenceState.FINISHED


class Residency:
    """Blocks given to sequences and taken back. `outcomes` collects what happened to those that gave way."""

    def __init__(self, pool: BlockPool, table: SequenceTable) -> None:
        self.outcomes: list[Outcome] = []
        self._pool = pool
        self._table = table
        self._computing: frozenset[SequenceId] = frozenset()
        self._returning: list[tuple[str, list[BlockIndex]]] = []

    @property
    def free_blocks(self) -> int:
        """Blocks for new work: one is kept back for each running sequence, so that admission does not
        preempt."""
        return max(0, self._pool.available - len(self._table.within(RUNNING)))

    def take_outcomes(self) -> list[Outcome]:
        taken, self.outcomes = self.outcomes, []
        return taken

    # blocks for a sequence

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)

    def admit(self, sequence: Sequence) -> bool:
        """Give a WAITING sequence every block of its context; the prefix that is here already is not computed
        again."""
        match = self._pool.match_prefix(sequence.chain, sequence.context_len - 1, sequence.owner)
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
        sequence.block_table = [*match.blocks, *fresh]
        sequence.num_sealed = len(match.blocks)
        sequence.num_cached = sequence.num_computed = covered
        sequence.copy = (partial.source, fresh[0]) if partial else None
        self._table.move(sequence, PREFILLING)
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Make room for the KV of a RUNNING sequence's next token. False if it waits, or is no more."""
        if self.blocks_for(sequence.num_computed + 1) <= len(sequence.block_table):
            return True
        while (fresh := self._pool.allocate(1, sequence.owner)) is None:
            if (victim := self._newest_speculative()) is not None:
                self.drop(victim)
            elif (victim := self._newest_preemptible()) is not sequence:
                self._fail(victim, Preempted(f"{victim.key} gave its blocks to older work"))
            else:
                return self._stall(sequence)
        sequence.block_table.extend(fresh)
        return True

    def _stall(self, sequence: Sequence) -> bool:
        """Nobody younger can give way to `sequence`: older work goes on instead, or what is pinned comes
        back."""
        held, total = len(sequence.block_table), self._pool.total
        if held >= total:
            message = f"{sequence.key} needs {held + 1} blocks, the cache has {total}: raise --kv-memory"
            self._fail(sequence, OutOfBlocks(message))
        elif len(self._preemptible()) > 1:
            self._fail(sequence, Preempted(f"{sequence.key} gave its blocks to older work"))
        return False

    # blocks back

    def drop(self, sequence: Sequence) -> None:
        """Back to WAITING without blocks: prefill starts over."""
        self._give_back(sequence)
        del sequence.tokens[sequence.context_len :]
        sequence.num_computed = sequence.num_cached = sequence.num_sealed = 0
        self._table.move(sequence, WAITING)
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

    def _allocate(self, sequence: Sequence, needed: int) -> tuple[BlockIndex, ...] | None:
        if not sequence.speculative:
            self._drop_speculative(needed)
        return self._pool.allocate(needed, sequence.owner) if needed <= self.free_blocks else None

    def _drop_speculative(self, needed: int) -> None:
        """Drop what it takes to get `needed` blocks, and nothing if that would not be enough."""
        victims = [each for state in (PREFILLING, HANDING_OFF) for each in self._speculative(state)]
        if needed > self.free_blocks + sum(len(victim.block_table) for victim in victims):
            return
        for victim in sorted(victims, key=lambda each: each.id, reverse=True):
            if needed <= self.free_blocks:
                return
            self.drop(victim)

    def _speculative(self, state: SequenceState) -> list[Sequence]:
        return [each for each in self._table.within(state).values() if each.speculative]

    def _newest_speculative(self) -> Sequence | None:
        victims = (*self._speculative(PREFILLING), *self._speculative(HANDING_OFF))
        return max(victims, key=lambda each: each.id, default=None)

    def _preemptible(self) -> list[Sequence]:
        local = (each for each in self._table.within(PREFILLING).values() if not each.hand_off)
        return [*self._table.within(RUNNING).values(), *local]

    def _newest_preemptible(self) -> Sequence:
        return max(self._preemptible(), key=lambda each: each.id)

    def _fail(self, sequence: Sequence, error: NodeFailed) -> None:
        self.finish(sequence)
        self.outcomes.append(Failed(sequence, error))

    def _give_back(self, sequence: Sequence) -> None:
        blocks = sequence.block_table
        if sequence.copy is not None:
            blocks = [*blocks, sequence.copy[0]]
        sequence.block_table, sequence.copy = [], None
        if sequence.id in self._computing:
            self._returning.append((sequence.owner, blocks))
        else:
            self._pool.release(blocks, sequence.owner)
