"""Policies that look at counts alone: they predict nothing and know of no caches."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from baton.types import Incarnation, Role
from coordinator.core.placement import Choice, Demand, NodeView, Outlook, holds_all, needed


class _Ranking(ABC):
    """Of the nodes of each role that can take it, the first by rank; nodes to avoid come after all others."""

    def choose(self, demand: Demand, nodes: Sequence[NodeView], outlook: Outlook) -> Choice | None:
        alone = holds_all(demand, nodes)
        if alone is not None:
            return alone
        chosen: dict[Role, Incarnation] = {}
        for role in needed(demand):
            able = [node for node in nodes if node.role is role and node.takes(demand)]
            if not able:
                return None
            first = min(able, key=lambda node: (node.incarnation in demand.avoid, *self._rank(node)))
            chosen[role] = first.incarnation
        return Choice(chosen.get(Role.PREFILL), chosen.get(Role.DECODE))

    @abstractmethod
    def _rank(self, node: NodeView) -> tuple[Any, ...]: ...


class RoundRobin(_Ranking):
    """The node that was given work longest ago."""

    def _rank(self, node: NodeView) -> tuple[Any, ...]:
        return (node.last_placed,)


class LeastLoaded(_Ranking):
    """The prefill node with the fewest tokens to compute, and the decode node with the smallest share of its sequences
    taken, then the most room. Ties go to the node that was given work longest ago."""

    def _rank(self, node: NodeView) -> tuple[Any, ...]:
        if node.role is Role.PREFILL:
            return node.uncomputed_tokens, node.last_placed
        return node.attempts / node.max_num_seqs, -node.room, node.last_placed
