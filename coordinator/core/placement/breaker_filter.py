"""Lets any placement policy choose only pairs whose circuit breaker is closed."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from baton.types import Role
from coordinator.core.placement.breakers import NodePair
from coordinator.core.placement.interface import (
    NodeChoice,
    NodeView,
    PlacementContext,
    PlacementDemand,
    PlacementPolicy,
)


def choose_excluding_open_breakers(
    placement: PlacementPolicy,
    demand: PlacementDemand,
    nodes: Sequence[NodeView],
    outlook: PlacementContext,
    apart: AbstractSet[NodePair],
) -> NodeChoice | None:
    """Choose as the policy does, without blocked pairs.

    The policy chooses among the decode nodes that some prefill node may write to. If it chooses a
    blocked pair, it chooses again among the other prefill nodes for that decode node. Costs nothing
    while no pair is blocked.
    """
    if not apart or not (demand.needs_prefill and demand.needs_decode):
        return placement.choose_nodes(demand, nodes, outlook)
    writers = [
        node.incarnation
        for node in nodes
        if node.role is Role.PREFILL and node.can_accept_prefill(demand)
    ]
    reached = [
        node
        for node in nodes
        if node.role is Role.PREFILL
        or node.incarnation == demand.prefix_holder  # needs no writer, or is not chosen
        or any((writer, node.incarnation) not in apart for writer in writers)
    ]
    first = placement.choose_nodes(demand, reached, outlook)
    if first is None or (first.prefill, first.decode) not in apart:
        return first
    able = [
        node
        for node in reached
        if node.incarnation == first.decode
        or (node.role is Role.PREFILL and (node.incarnation, first.decode) not in apart)
    ]
    second = placement.choose_nodes(demand, able, outlook)
    return (
        replace(second, predicted_seconds={**first.predicted_seconds, **second.predicted_seconds})
        if second is not None
        else None
    )
