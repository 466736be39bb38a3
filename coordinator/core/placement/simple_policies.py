"""Policies that compare counts only: they predict nothing and use no cache information."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from baton.types import Incarnation, Role
from coordinator.core.placement.interface import (
    NodeChoice,
    NodeView,
    PlacementContext,
    PlacementDemand,
    choose_prefix_holder,
    required_roles,
)


class _RankingPolicy(ABC):
    """Chooses, for each role, the first node by rank; nodes to avoid come last."""

    def choose_nodes(
        self, demand: PlacementDemand, nodes: Sequence[NodeView], outlook: PlacementContext
    ) -> NodeChoice | None:
        alone = choose_prefix_holder(demand, nodes)
        if alone is not None:
            return alone
        chosen: dict[Role, Incarnation] = {}
        for role in required_roles(demand):
            able = [node for node in nodes if node.role is role and node.can_accept(demand)]
            if not able:
                return None
            first = min(
                able, key=lambda node: (node.incarnation in demand.avoided_nodes, *self._rank(node))
            )
            chosen[role] = first.incarnation
        return NodeChoice(chosen.get(Role.PREFILL), chosen.get(Role.DECODE))

    @abstractmethod
    def _rank(self, node: NodeView) -> tuple[Any, ...]: ...


class RoundRobinPolicy(_RankingPolicy):
    """Chooses the node that was given work longest ago."""

    def _rank(self, node: NodeView) -> tuple[Any, ...]:
        return (node.last_placed_serial,)


class LeastLoadedPolicy(_RankingPolicy):
    """Chooses the least loaded nodes: the prefill node with the fewest tokens to compute, and the
    decode node with the smallest share of slots taken, then the most free blocks. Ties go to the
    node that was given work longest ago."""

    def _rank(self, node: NodeView) -> tuple[Any, ...]:
        if node.role is Role.PREFILL:
            return node.uncomputed_tokens, node.last_placed_serial
        return node.attempts / node.max_num_seqs, -node.free_blocks, node.last_placed_serial
