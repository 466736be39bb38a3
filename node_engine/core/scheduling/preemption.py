"""Who gives its blocks up when a running sequence needs one more. Policies are pluggable; three
rules hold for all: the lowest class first and never one above the asker's own; nobody who is nearly
done, while there is somebody else; and the answer may be the asker itself.

There is no livelock: a preempted sequence keeps the tokens that its client has, whoever took the
blocks draws a token with them in the same step, and the coordinator places the loser again only
where its whole context has room.
"""

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from node_engine.core.sequences.sequence import Sequence

NEARLY_DONE_TOKENS = 8  # tokens: waiting for them is cheaper than computing a whole context again


class PreemptionPolicy(Protocol):
    def choose_victim(self, candidates: SequenceOf[Sequence]) -> Sequence:
        """One of `candidates`, of which there is at least one, all of one class."""
        ...


class MostBlocksFirst:
    """One sequence goes instead of many; then the newest."""

    def choose_victim(self, candidates: SequenceOf[Sequence]) -> Sequence:
        return max(candidates, key=lambda each: (each.num_own_blocks, each.id))


class CheapestToResumeFirst:
    """The fewest tokens whose KV would have to be computed again; then the newest."""

    def choose_victim(self, candidates: SequenceOf[Sequence]) -> Sequence:
        return min(candidates, key=lambda each: (each.num_computed_tokens, -each.id))


PREEMPTION_POLICIES: dict[str, type[PreemptionPolicy]] = {
    "most_blocks": MostBlocksFirst,
    "cheapest": CheapestToResumeFirst,
}


def select_victim(
    asker: Sequence, residents: SequenceOf[Sequence], policy: PreemptionPolicy
) -> Sequence:
    """`residents` include the asker."""
    below = [each for each in residents if each.priority_level >= asker.priority_level]
    able = [each for each in below if each.num_remaining_tokens > NEARLY_DONE_TOKENS] or below
    lowest = max(each.priority_level for each in able)
    return policy.choose_victim([each for each in able if each.priority_level == lowest])
