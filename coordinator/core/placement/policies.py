"""The placement policies by the names that --placement takes.

Policies that compare counts only: they predict nothing and use no cache information.

Placement by predicted completion: cached prefixes, queues, and the speed of each node.

The decode node is chosen first, then the prefill node that serves it soonest:

    decode    output x step(batch + 1, resident + context)  + transfer of what it lacks  + risk
    prefill   wait + prefill(context - cached, cached)      + transfer to that decode node

`risk` is the cost of recomputing the context, times the share of the expected growth that finds no
free block. A decode node that computes the prompt itself has wait and prefill instead of the
transfer. Each pass is linear in nodes.

Affinity is bounded, as in Mirrokni, Thorup, Zadimoghaddam, "Consistent hashing with bounded loads"
(2018): a node with more than `LOAD_BOUND` times the mean load ranks behind all others, whatever it
has cached. Its prefixes are then cached elsewhere too, which spreads their load. The load of a node
that has just joined is ramped up over `RAMP_UP_SECONDS`. Predictions that differ by less than their
usual error are ties, which the load decides.

Lets any placement policy choose only pairs whose circuit breaker is closed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from operator import itemgetter
from typing import Any

from baton.types import Incarnation, Role
from coordinator.core.estimates.workload import WINDOW_SECONDS
from coordinator.core.placement.breakers import NodePair
from coordinator.core.placement.interface import (
    NodeChoice,
    NodeView,
    PlacementContext,
    PlacementDemand,
    PlacementPolicy,
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


LOAD_BOUND = 1.25  # times the mean load, above which affinity does not count
# a prefill node that is busy for less of its time is never overloaded
IDLE_UTILIZATION = 0.05
RAMP_UP_SECONDS = 10.0  # after joining, until a node gets as much work as others
TIE_SECONDS = 0.0005  # predictions that differ by less are equal
_OVERLOADED_TIER, _AVOIDED_TIER = 1, 2
_by_tier_and_time = itemgetter(0, 1)


_RankedNode = tuple[int, float, NodeView]  # tier, seconds, node


class PrefixAwarePolicy:
    def choose_nodes(
        self, demand: PlacementDemand, nodes: Sequence[NodeView], outlook: PlacementContext
    ) -> NodeChoice | None:
        alone = choose_prefix_holder(demand, nodes)
        if alone is not None:
            return alone
        decode = prefill = None
        margin = outlook.cost_model.error_margin
        scores: list[_RankedNode] = []
        if demand.needs_decode:
            found = _decode_candidates(demand, nodes, outlook)
            if not found:
                return None
            decode = _choose_best(found, margin, lambda node: _decode_tie_break(demand, node))
            scores += found
        if demand.needs_prefill:
            found = _prefill_candidates(demand, nodes, decode, outlook)
            if not found:
                return None
            prefill = _choose_best(
                found, margin, lambda node: (node.recent_work, node.last_placed_serial)
            )
            scores += found
        return NodeChoice(
            prefill.incarnation if prefill else None,
            decode.incarnation if decode else None,
            {node.incarnation: seconds for _, seconds, node in scores},
        )


def _decode_candidates(
    demand: PlacementDemand, nodes: Sequence[NodeView], outlook: PlacementContext
) -> list[_RankedNode]:
    of_role = [node for node in nodes if node.role is Role.DECODE]
    crowded = LOAD_BOUND * sum([node.attempts for node in of_role]) / max(1, len(of_role)) + 1
    costs, now, tokens, output = (
        outlook.cost_model,
        outlook.now,
        demand.context_tokens,
        demand.expected_output_tokens,
    )
    growth = max(1.0, output / outlook.block_size)
    unheld = costs.fleet_transfer_seconds(tokens * outlook.token_bytes)
    found: list[_RankedNode] = []
    for node in of_role:
        if not node.can_accept_decode(demand):
            continue
        cost, held = costs.get_node_costs(node.name), demand.cached_tokens_on(node.incarnation)
        seconds = output * cost.step_seconds(node.attempts + 1, node.resident_tokens + tokens)
        if not demand.needs_prefill:
            seconds += node.queue_wait_seconds(now) + outlook.interleaved_prefill_seconds(
                node, cost.prefill_seconds(tokens - held, held)
            )
        else:
            seconds += (
                costs.fleet_transfer_seconds((tokens - held) * outlook.token_bytes)
                if held
                else unheld
            )
        spare = node.free_blocks - demand.blocks
        if spare < growth:
            seconds += (1.0 - spare / growth) * cost.prefill_seconds(tokens, 0)
        found.append((_rank_tier(demand, node, node.attempts > crowded, now), seconds, node))
    return found


def _prefill_candidates(
    demand: PlacementDemand,
    nodes: Sequence[NodeView],
    decode: NodeView | None,
    outlook: PlacementContext,
) -> list[_RankedNode]:
    of_role = [node for node in nodes if node.role is Role.PREFILL]
    mean = sum([node.recent_work for node in of_role]) / max(1, len(of_role))
    loaded = max(LOAD_BOUND * mean, IDLE_UTILIZATION * WINDOW_SECONDS * outlook.work_unit)
    costs, now, tokens = outlook.cost_model, outlook.now, demand.context_tokens
    lacking = (
        (tokens - demand.cached_tokens_on(decode.incarnation)) * outlook.token_bytes
        if decode is not None
        else 0
    )
    found: list[_RankedNode] = []
    for node in of_role:
        if not node.can_accept_prefill(demand):
            continue
        held = demand.cached_tokens_on(node.incarnation)
        seconds = costs.get_node_costs(node.name).prefill_seconds(tokens - held, held)
        seconds += node.queue_wait_seconds(now)
        if decode is not None:
            seconds += costs.transfer_seconds(node.name, decode.name, lacking)
        found.append((_rank_tier(demand, node, node.recent_work > loaded, now), seconds, node))
    return found


def _rank_tier(demand: PlacementDemand, node: NodeView, loaded: bool, now: float) -> int:
    """Return the tier of a node; a lower one is always preferred."""
    if node.incarnation in demand.avoided_nodes:
        return _AVOIDED_TIER
    return _OVERLOADED_TIER if loaded or is_ramping_up(node, now) else 0


def is_ramping_up(node: NodeView, now: float) -> bool:
    """Return whether the node has joined recently and has its share of work for that time."""
    age = now - node.joined_at
    return age < RAMP_UP_SECONDS and node.attempts >= max(
        1.0, node.max_num_seqs * age / RAMP_UP_SECONDS
    )


def _decode_tie_break(demand: PlacementDemand, node: NodeView) -> tuple[Any, ...]:
    """Prefer a cached quarter of the context more, then the smaller load."""
    quarters = demand.cached_tokens_on(node.incarnation) * 4 // demand.context_tokens
    return -quarters, node.attempts / node.max_num_seqs, -node.free_blocks, node.last_placed_serial


def _choose_best(
    found: Sequence[_RankedNode], margin: float, tie: Callable[[NodeView], tuple[Any, ...]]
) -> NodeView:
    best, fastest, _ = min(found, key=_by_tier_and_time)
    near = fastest * (1.0 + margin) + TIE_SECONDS
    return min([node for tier, seconds, node in found if tier == best and seconds <= near], key=tie)


POLICIES: dict[str, Callable[[], PlacementPolicy]] = {
    "round_robin": RoundRobinPolicy,
    "least_loaded": LeastLoadedPolicy,
    "prefix_aware": PrefixAwarePolicy,
}


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
