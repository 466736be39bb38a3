"""Selects the sequence to preempt when a running sequence needs one more block.

Policies are pluggable; three rules hold for all. The lowest class is preempted first, never one
above the requesting sequence's own. A sequence that is nearly done is spared while there is another
candidate. The requesting sequence itself may be selected.

There is no livelock: a preempted sequence keeps the tokens that its client has, the sequence that
takes the blocks samples a token with them in the same step, and the coordinator places the
preempted one again only on a node with room for its whole context.
"""

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from node_engine.core.sequences.sequence import Sequence

NEARLY_DONE_TOKENS = 8  # waiting for so few tokens is cheaper than a recompute


class PreemptionPolicy(Protocol):
    def choose_victim(self, candidates: SequenceOf[Sequence]) -> Sequence:
        """Select one of `candidates`: at least one sequence, all of one class."""
        ...


class MostBlocksFirst:
    """The sequence with the most blocks, so that few are preempted; then the newest."""

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
