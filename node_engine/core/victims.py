"""Who gives its blocks up when a running sequence needs one more. Policies are pluggable; three rules hold for all:
the lowest class first and never one above the asker's own; nobody who is nearly done, while there is somebody else;
and the answer may be the asker itself.

There is no livelock: a preempted sequence keeps the tokens that its client has, whoever took the blocks draws a token
with them in the same step, and the coordinator places the loser again only where its whole context has room.
"""

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from node_engine.core.sequence import Sequence

NEARLY_DONE = 8  # tokens: waiting for them is cheaper than computing a whole context again


class VictimPolicy(Protocol):
    def choose(self, candidates: SequenceOf[Sequence]) -> Sequence:
        """One of `candidates`, of which there is at least one, all of one class."""
        ...


class MostBlocks:
    """One sequence goes instead of many; then the newest."""

    def choose(self, candidates: SequenceOf[Sequence]) -> Sequence:
        return max(candidates, key=lambda each: (len(each.block_table), each.id))


class CheapestToResume:
    """The fewest tokens whose KV would have to be computed again; then the newest."""

    def choose(self, candidates: SequenceOf[Sequence]) -> Sequence:
        return min(candidates, key=lambda each: (each.num_computed, -each.id))


POLICIES: dict[str, type[VictimPolicy]] = {"most_blocks": MostBlocks, "cheapest": CheapestToResume}


def victim_for(asker: Sequence, residents: SequenceOf[Sequence], policy: VictimPolicy) -> Sequence:
    """`residents` include the asker."""
    below = [each for each in residents if each.level >= asker.level]
    able = [each for each in below if each.remaining > NEARLY_DONE] or below
    lowest = max(each.level for each in able)
    return policy.choose([each for each in able if each.level == lowest])
