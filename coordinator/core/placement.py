"""Who serves an attempt. A policy sees an immutable snapshot and answers with nodes, or with None: wait.

The window of a node is small on purpose: what waits, waits in the coordinator, where deadlines and fairness have one
home and from where a dead node takes little with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.types import Incarnation, Role

PREFILL_ATTEMPTS = 2  # one computes, the next is there when it ends


@dataclass(frozen=True, slots=True)
class Demand:
    """What an attempt needs. `tokens` of context, `blocks` for them and a little growth. `avoid`: nodes of its last
    failed attempt, taken only if there is no other. `holder`: a decode node whose cache has the whole context, so that
    there it needs no prefill. `reserve`: share of a node's blocks and places that this demand must leave to the first
    class."""

    tokens: int
    blocks: int
    prefill: bool
    decode: bool
    avoid: frozenset[Incarnation] = frozenset()
    holder: Incarnation | None = None
    reserve: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node at this moment. `computing` attempts with `uncomputed_tokens` are placed on a prefill node and not
    computed yet; `window_tokens` are those, but of one prompt at most a step's; `room` in blocks; `closed_from`:
    demands of so many blocks were refused; `first_class_blocks` of `blocks` and `first_class_attempts` of `attempts`
    are the first class's."""

    incarnation: Incarnation
    role: Role
    max_num_seqs: int
    max_batched_tokens: int
    attempts: int
    computing: int
    uncomputed_tokens: int
    room: int
    closed_from: int | None
    last_placed: int
    window_tokens: int = 0
    blocks: int = 0
    first_class_blocks: int = 0
    first_class_attempts: int = 0

    def takes_prefill(self, demand: Demand) -> bool:
        """Two attempts, or two steps' worth of tokens, and always at least one. A long prompt takes one step's share of
        that, so that short ones can come to the node and pass it. Blocks are the node's to refuse: what it keeps until
        a hand-off has committed is not in the coordinator's books."""
        if self._is_closed_to(demand) or self.computing >= self.max_num_seqs:
            return False
        share = min(demand.tokens, self.max_batched_tokens)
        return self.window_tokens + share <= 2 * self.max_batched_tokens or self.computing < PREFILL_ATTEMPTS

    def takes_decode(self, demand: Demand) -> bool:
        kept = min(int(demand.reserve * self.blocks), self.blocks - demand.blocks)  # who needs them all may have them
        blocks = max(0, kept - self.first_class_blocks)
        places = max(0, int(demand.reserve * self.max_num_seqs) - self.first_class_attempts)
        fits = self.attempts < self.max_num_seqs - places and demand.blocks <= self.room - blocks
        return fits and not self._is_closed_to(demand)

    def _is_closed_to(self, demand: Demand) -> bool:
        return self.closed_from is not None and demand.blocks >= self.closed_from


@dataclass(frozen=True, slots=True)
class Choice:
    prefill: Incarnation | None
    decode: Incarnation | None


class Placement(Protocol):
    def choose(self, demand: Demand, nodes: Sequence[NodeView]) -> Choice | None:
        """Nodes for every role that the demand needs, or None to wait."""
        ...


class LeastLoaded:
    """The decode node that holds the context, alone, if it has room. Else the prefill node with the fewest tokens to
    compute, and the decode node with the smallest share of its sequences taken, then the most room. Ties go to the node
    that was given work longest ago."""

    def choose(self, demand: Demand, nodes: Sequence[NodeView]) -> Choice | None:
        prefill = decode = None
        holder = next((node for node in nodes if node.incarnation == demand.holder), None)
        if holder is not None and holder.takes_decode(demand):
            return Choice(None, holder.incarnation)
        if demand.prefill:
            able = [node for node in nodes if node.role is Role.PREFILL and node.takes_prefill(demand)]
            if not able:
                return None
            prefill = min(
                able, key=lambda node: (node.incarnation in demand.avoid, node.uncomputed_tokens, node.last_placed)
            ).incarnation
        if demand.decode:
            able = [node for node in nodes if node.role is Role.DECODE and node.takes_decode(demand)]
            if not able:
                return None
            decode = min(
                able,
                key=lambda node: (
                    node.incarnation in demand.avoid,
                    node.attempts / node.max_num_seqs,
                    -node.room,
                    node.last_placed,
                ),
            ).incarnation
        return Choice(prefill, decode)
