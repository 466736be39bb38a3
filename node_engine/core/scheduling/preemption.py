"""How blocks are taken back from sequences: when they end, and when others need them.

When a block is missing, unticketed prefills are requeued first, the lowest class and then the
newest first; then a running or locally prefilling sequence is preempted. Blocks under a ticket or
read by a sender are never taken: they are returned when the hand-off ends, and the sequence that
needs them waits.

Policies that choose whom to preempt are pluggable; three rules hold for all. The lowest class is
preempted first, never one above the requesting sequence's own. A sequence that is nearly done is
spared while there is another candidate. The requesting sequence itself may be selected.

There is no livelock: a preempted sequence keeps the tokens that its client has, the sequence that
takes the blocks samples a token with them in this step or the next, and the coordinator places the
preempted one again only on a node with room for its whole context.
"""

from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from baton.errors import NodeFailed, OutOfBlocks, Preempted
from baton.types import AttemptKey, BlockIndex
from node_engine.core.blocks.block_pool import BlockPool
from node_engine.core.blocks.pool_prefix import RefCountedPin
from node_engine.core.sequences.outcomes import PrefillRequeued, SequenceFailed, SequenceOutcome
from node_engine.core.sequences.sequence import (
    Sequence,
    SequenceState,
    SequenceTable,
    handoff_owner_label,
)
from node_engine.core.step.step_batch import SequenceId

WAITING, PREFILLING = SequenceState.WAITING, SequenceState.PREFILLING
RUNNING, AWAITING_KV = SequenceState.RUNNING, SequenceState.AWAITING_KV
HANDING_OFF = SequenceState.HANDING_OFF
NEARLY_DONE_TOKENS = 8  # waiting for so few tokens is cheaper than a recompute


class PreemptionPolicy(Protocol):
    def choose_victim(self, candidates: SequenceOf[Sequence]) -> Sequence:
        """Select one of `candidates`: at least one sequence, all of one class."""
        ...


class MostBlocksFirst:
    """Preempts the sequence with the most KV blocks: one is then enough. Of equals the newest."""

    def choose_victim(self, candidates: SequenceOf[Sequence]) -> Sequence:
        return max(candidates, key=lambda sequence: (sequence.num_own_blocks, sequence.id))


class CheapestToResumeFirst:
    """The sequence with the fewest computed tokens to compute again; then the newest."""

    def choose_victim(self, candidates: SequenceOf[Sequence]) -> Sequence:
        return min(candidates, key=lambda sequence: (sequence.num_computed_tokens, -sequence.id))


PREEMPTION_POLICIES: dict[str, type[PreemptionPolicy]] = {
    "most_blocks": MostBlocksFirst,
    "cheapest": CheapestToResumeFirst,
}


def select_victim(
    requester: Sequence, residents: SequenceOf[Sequence], policy: PreemptionPolicy
) -> Sequence:
    """The sequence to preempt in favour of `requester`, which is one of `residents`."""
    below = [other for other in residents if other.priority_level >= requester.priority_level]
    candidates = [
        other for other in below if other.num_remaining_tokens > NEARLY_DONE_TOKENS
    ] or below
    lowest = max(other.priority_level for other in candidates)
    return policy.choose_victim([other for other in candidates if other.priority_level == lowest])


class BlockReleaser:
    """Releases the blocks and pool pins of sequences.

    Those of a sequence in the step in flight are released when the step ends, because the engine
    may be writing them until then.
    """

    def __init__(self, pool: BlockPool, sequences: SequenceTable) -> None:
        self._block_pool = pool
        self._sequences = sequences
        # Of the step in flight: until `end_step` the engine may write blocks of these sequences.
        self.ids_in_flight: Collection[SequenceId] = ()
        self._deferred: list[tuple[str, list[BlockIndex], list[RefCountedPin]]] = []

    def end_step(self) -> None:
        """Release the blocks of sequences that ended during the step."""
        self.ids_in_flight = ()
        for owner, blocks, pins in self._deferred:
            self._release_references(owner, blocks, pins)
        self._deferred.clear()

    def finish_sequence(self, sequence: Sequence) -> None:
        """End a sequence in any state and release its blocks and pins."""
        self.release_blocks_of(sequence)
        sequence.pool_use.set_prefix(None)
        self._sequences.change_state(sequence, SequenceState.FINISHED)

    def release_blocks_of(self, sequence: Sequence) -> None:
        """Empty the block table of `sequence`; its blocks are released now or after the step."""
        blocks, pool_use = sequence.block_table, sequence.pool_use
        if sequence.pending_copy is not None:
            blocks = [*blocks, sequence.pending_copy[0]]
        pins, pool_use.pins = pool_use.pins, []
        sequence.block_table, sequence.pending_copy, pool_use.num_blocks = [], None, 0
        if sequence.id in self.ids_in_flight:
            self._deferred.append((sequence.owner, blocks, pins))
        else:
            self._release_references(sequence.owner, blocks, pins)

    def _release_references(
        self, owner: str, blocks: list[BlockIndex], pins: list[RefCountedPin]
    ) -> None:
        self._block_pool.release_blocks(blocks, owner)
        for pin in pins:
            pin.release()


class Preemptor:
    """Takes blocks from sequences for others, and collects the outcomes for those."""

    def __init__(
        self,
        pool: BlockPool,
        sequences: SequenceTable,
        releaser: BlockReleaser,
        policy: PreemptionPolicy,
        free_blocks: Callable[[], int],
    ) -> None:
        """`free_blocks`: see NodeCapacity."""
        self._block_pool = pool
        self._sequences = sequences
        self._free_blocks = free_blocks
        self._releaser = releaser
        self._policy = policy
        self.outcomes: list[SequenceOutcome] = []  # not popped yet
        self.requeued: set[AttemptKey] = set()  # their senders may still hold blocks

    def pop_outcomes(self) -> tuple[SequenceOutcome, ...]:
        outcomes, self.outcomes = tuple(self.outcomes), []
        return outcomes

    def on_admitted(self, sequence: Sequence) -> None:
        """`sequence` has blocks again: what its sender holds is no longer about to be released."""
        self.requeued.discard(sequence.key)

    def count_releasing_blocks(self) -> int:
        """Blocks of requeued prefills that their senders still read; they become free soon."""
        held = {
            key: self._block_pool.ownership.count_blocks_held_by(handoff_owner_label(key))
            for key in self.requeued
        }
        self.requeued = {key for key, count in held.items() if count}
        return sum(held.values())

    def take_block_for(self, sequence: Sequence) -> bool:
        """Make one more block allocatable for a RUNNING sequence.

        Returns False if nothing was taken: the sequence must wait, or has ended itself.
        """
        if self.count_releasing_blocks():
            return False
        victim = self._find_newest_unticketed()
        if victim is not None:
            self._requeue_prefill(victim, sequence)
            return True
        victim = select_victim(sequence, self._list_preemptible(), self._policy)
        if victim is sequence:
            self._end_or_wait(sequence)
            return False
        self._preempt_sequence(victim, sequence.tenant_class)
        return True

    def requeue_unticketed_for(self, sequence: Sequence, needed: int) -> None:
        """Requeue as many unticketed prefills as needed for `sequence` to get `needed` blocks.

        Some blocks may become free only when senders release them. Does nothing if all unticketed
        prefills together would not be enough.
        """
        room = self._free_blocks() + self.count_releasing_blocks()
        victims = self._list_unticketed()
        if needed > room + sum(victim.num_own_blocks for victim in victims):
            return
        victims.sort(key=lambda victim: (victim.priority_level, victim.id), reverse=True)
        for victim in victims:
            if needed <= room:
                return
            self._requeue_prefill(victim, sequence)
            room = self._free_blocks() + self.count_releasing_blocks()

    def _end_or_wait(self, sequence: Sequence) -> None:
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
            self._preempt_sequence(sequence, above)

    def _preempt_sequence(self, sequence: Sequence, preempting_class: str) -> None:
        error = Preempted(f"{sequence.key} gave its blocks to other work")
        self._fail_sequence(sequence, error, preempting_class)

    def _fail_sequence(
        self, sequence: Sequence, error: NodeFailed, preempting_class: str = ""
    ) -> None:
        self._releaser.finish_sequence(sequence)
        self.outcomes.append(SequenceFailed(sequence, error, preempting_class))

    def _requeue_prefill(self, sequence: Sequence, taker: Sequence) -> None:
        """Take the blocks of `sequence`, which `taker` needs; it is WAITING and starts over."""
        self._releaser.release_blocks_of(sequence)
        sequence.restart_prefill(
            taker.tenant_class if taker.priority_level < sequence.priority_level else ""
        )
        self._sequences.change_state(sequence, WAITING)
        self.requeued.add(sequence.key)
        self.outcomes.append(PrefillRequeued(sequence))

    def _find_newest_unticketed(self) -> Sequence | None:
        return max(
            self._list_unticketed(),
            key=lambda victim: (victim.priority_level, victim.id),
            default=None,
        )

    def _list_unticketed(self) -> list[Sequence]:
        return [
            sequence
            for state in (PREFILLING, HANDING_OFF)
            for sequence in self._sequences.get_by_state(state).values()
            if sequence.is_unticketed
        ]

    def _list_preemptible(self) -> list[Sequence]:
        local = (
            sequence
            for sequence in self._sequences.get_by_state(PREFILLING).values()
            if not sequence.is_prefill_only
        )
        return [*self._sequences.get_by_state(RUNNING).values(), *local]
