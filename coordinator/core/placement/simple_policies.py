"""Policies that look at counts alone: they predict nothing and know of no caches."""

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
    """Of the nodes of each role that can take it, the first by rank; nodes to avoid come after all
    others."""

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
    """The node that was given work longest ago."""

    def _rank(self, node: NodeView) -> tuple[Any, ...]:
        return (node.last_placed_serial,)


class LeastLoadedPolicy(_RankingPolicy):
    """The prefill node with the fewest tokens to compute, and the decode node with the smallest
    share of its sequences taken, then the most room. Ties go to the node that was given work
    longest ago."""

    def _rank(self, node: NodeView) -> tuple[Any, ...]:
        if node.role is Role.PREFILL:
            return node.uncomputed_tokens, node.last_placed_serial
        return node.attempts / node.max_num_seqs, -node.free_blocks, node.last_placed_serial
