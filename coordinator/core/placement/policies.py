"""The placement policies by the names that --placement takes.

`RoundRobinPolicy` and `LeastLoadedPolicy` compare counts only: they predict nothing and use no
cache information.

`PrefixAwarePolicy` goes by predicted completion: cached prefixes, queues, and the speed of each
node. The decode node is chosen first, then the prefill node that serves it soonest:

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

`choose_excluding_open_breakers` lets any policy choose only pairs whose circuit breaker is closed.
`decide_nodes` predicts the latency of what it has chosen.
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
    LatencyPrediction,
    NodeChoice,
    PlacementContext,
    PlacementDecision,
    PlacementPolicy,
    PlacementReason,
    PrefillSite,
)
from coordinator.core.placement.node_loads import NodeView, PlacementDemand


def choose_prefix_holder(demand: PlacementDemand, nodes: Sequence[NodeView]) -> NodeChoice | None:
    """Return the decode node that caches the whole context, alone, if it has room."""
    if demand.prefix_holder is None:
        return None
    holder = next((node for node in nodes if node.incarnation == demand.prefix_holder), None)
    return (
        NodeChoice(None, holder.incarnation)
        if holder is not None and holder.can_accept_decode(demand)
        else None
    )


class _RankingPolicy(ABC):
    """Chooses, for each role, the first node by rank; nodes to avoid come last."""

    def choose_nodes(
        self, demand: PlacementDemand, nodes: Sequence[NodeView], context: PlacementContext
    ) -> NodeChoice | None:
        holder = choose_prefix_holder(demand, nodes)
        if holder is not None:
            return holder
        chosen: dict[Role, Incarnation] = {}
        for role in demand.required_roles:
            eligible = [node for node in nodes if node.role is role and node.can_accept(demand)]
            if not eligible:
                return None
            first = min(
                eligible,
                key=lambda node: (node.incarnation in demand.avoided_nodes, *self._rank(node)),
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
    """Chooses the nodes with the earliest predicted completion, by cost model and cached
    prefixes."""

    def choose_nodes(
        self, demand: PlacementDemand, nodes: Sequence[NodeView], context: PlacementContext
    ) -> NodeChoice | None:
        holder = choose_prefix_holder(demand, nodes)
        if holder is not None:
            return holder
        decode = prefill = None
        margin = context.cost_model.error_margin
        scores: list[_RankedNode] = []
        if demand.needs_decode:
            candidates = _decode_candidates(demand, nodes, context)
            if not candidates:
                return None
            decode = _choose_best(candidates, margin, lambda node: _decode_tie_break(demand, node))
            scores += candidates
        if demand.needs_prefill:
            candidates = _prefill_candidates(demand, nodes, decode, context)
            if not candidates:
                return None
            prefill = _choose_best(
                candidates, margin, lambda node: (node.recent_work, node.last_placed_serial)
            )
            scores += candidates
        return NodeChoice(
            prefill.incarnation if prefill else None,
            decode.incarnation if decode else None,
            {node.incarnation: seconds for _, seconds, node in scores},
        )


def _decode_candidates(
    demand: PlacementDemand, nodes: Sequence[NodeView], context: PlacementContext
) -> list[_RankedNode]:
    of_role = [node for node in nodes if node.role is Role.DECODE]
    crowded = LOAD_BOUND * sum([node.attempts for node in of_role]) / max(1, len(of_role)) + 1
    costs, now, tokens, output = (
        context.cost_model,
        context.now,
        demand.context_tokens,
        demand.expected_output_tokens,
    )
    growth = max(1.0, output / context.block_size)
    uncached_transfer_seconds = costs.fleet_transfer_seconds(tokens * context.token_bytes)
    candidates: list[_RankedNode] = []
    for node in of_role:
        if not node.can_accept_decode(demand):
            continue
        cost, cached_tokens = (
            costs.get_node_costs(node.name),
            demand.cached_tokens_on(node.incarnation),
        )
        seconds = output * cost.step_seconds(node.attempts + 1, node.resident_tokens + tokens)
        if not demand.needs_prefill:
            seconds += node.queue_wait_seconds(now) + context.interleaved_prefill_seconds(
                node, cost.prefill_seconds(tokens - cached_tokens, cached_tokens)
            )
        else:
            seconds += (
                costs.fleet_transfer_seconds((tokens - cached_tokens) * context.token_bytes)
                if cached_tokens
                else uncached_transfer_seconds
            )
        spare = node.free_blocks - demand.blocks
        if spare < growth:
            seconds += (1.0 - spare / growth) * cost.prefill_seconds(tokens, 0)
        candidates.append((_rank_tier(demand, node, node.attempts > crowded, now), seconds, node))
    return candidates


def _prefill_candidates(
    demand: PlacementDemand,
    nodes: Sequence[NodeView],
    decode: NodeView | None,
    context: PlacementContext,
) -> list[_RankedNode]:
    of_role = [node for node in nodes if node.role is Role.PREFILL]
    mean = sum([node.recent_work for node in of_role]) / max(1, len(of_role))
    loaded = max(LOAD_BOUND * mean, IDLE_UTILIZATION * WINDOW_SECONDS * context.work_unit)
    costs, now, tokens = context.cost_model, context.now, demand.context_tokens
    missing_bytes = (
        (tokens - demand.cached_tokens_on(decode.incarnation)) * context.token_bytes
        if decode is not None
        else 0
    )
    candidates: list[_RankedNode] = []
    for node in of_role:
        if not node.can_accept_prefill(demand):
            continue
        cached_tokens = demand.cached_tokens_on(node.incarnation)
        seconds = costs.get_node_costs(node.name).prefill_seconds(
            tokens - cached_tokens, cached_tokens
        )
        seconds += node.queue_wait_seconds(now)
        if decode is not None:
            seconds += costs.transfer_seconds(node.name, decode.name, missing_bytes)
        candidates.append((_rank_tier(demand, node, node.recent_work > loaded, now), seconds, node))
    return candidates


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
    candidates: Sequence[_RankedNode],
    margin: float,
    tie_break: Callable[[NodeView], tuple[Any, ...]],
) -> NodeView:
    best, fastest, _ = min(candidates, key=_by_tier_and_time)
    near = fastest * (1.0 + margin) + TIE_SECONDS
    return min(
        [node for tier, seconds, node in candidates if tier == best and seconds <= near],
        key=tie_break,
    )


POLICIES: dict[str, Callable[[], PlacementPolicy]] = {
    "round_robin": RoundRobinPolicy,
    "least_loaded": LeastLoadedPolicy,
    "prefix_aware": PrefixAwarePolicy,
}


def choose_excluding_open_breakers(
    policy: PlacementPolicy,
    demand: PlacementDemand,
    nodes: Sequence[NodeView],
    context: PlacementContext,
    blocked_pairs: AbstractSet[NodePair],
) -> NodeChoice | None:
    """Choose as the policy does, without blocked pairs.

    The policy chooses among the decode nodes that some prefill node may write to. If it chooses a
    blocked pair, it chooses again among the other prefill nodes for that decode node. Costs nothing
    while no pair is blocked.
    """
    if not blocked_pairs or not (demand.needs_prefill and demand.needs_decode):
        return policy.choose_nodes(demand, nodes, context)
    writers = [
        node.incarnation
        for node in nodes
        if node.role is Role.PREFILL and node.can_accept_prefill(demand)
    ]
    reachable = [
        node
        for node in nodes
        if node.role is Role.PREFILL
        or node.incarnation == demand.prefix_holder  # needs no writer, or is not chosen
        or any((writer, node.incarnation) not in blocked_pairs for writer in writers)
    ]
    first = policy.choose_nodes(demand, reachable, context)
    if first is None or (first.prefill, first.decode) not in blocked_pairs:
        return first
    eligible = [
        node
        for node in reachable
        if node.incarnation == first.decode
        or (node.role is Role.PREFILL and (node.incarnation, first.decode) not in blocked_pairs)
    ]
    second = policy.choose_nodes(demand, eligible, context)
    return (
        replace(second, predicted_seconds={**first.predicted_seconds, **second.predicted_seconds})
        if second is not None
        else None
    )


def predict_latency(
    demand: PlacementDemand,
    choice: NodeChoice,
    nodes: Sequence[NodeView],
    context: PlacementContext,
) -> LatencyPrediction:
    """Predict the latency of the demand on the chosen nodes."""
    prefill = decode = None
    for view in nodes:
        if view.incarnation == choice.prefill:
            prefill = view
        elif view.incarnation == choice.decode:
            decode = view
    costs, tokens, output = context.cost_model, demand.context_tokens, demand.expected_output_tokens
    queue = compute = transfer = step = 0.0
    computing_node = prefill or decode
    if computing_node is not None:
        cached_tokens = (
            demand.cached_tokens_on(computing_node.incarnation)
            if computing_node.incarnation != demand.prefix_holder
            else tokens - 1
        )
        queue = computing_node.queue_wait_seconds(context.now)
        compute = costs.get_node_costs(computing_node.name).prefill_seconds(
            tokens - cached_tokens, cached_tokens
        )
        if prefill is None:
            compute = context.interleaved_prefill_seconds(computing_node, compute)
    if prefill is not None and decode is not None:
        missing_tokens = tokens - demand.cached_tokens_on(decode.incarnation)
        transfer = costs.transfer_seconds(
            prefill.name, decode.name, missing_tokens * context.token_bytes
        )
    resident = tokens + output / 2
    if decode is not None:
        step = costs.get_node_costs(decode.name).step_seconds(
            decode.attempts + 1, decode.resident_tokens + resident
        )
    return LatencyPrediction(queue, compute, transfer, step, output, resident)


def decide_nodes(
    policy: PlacementPolicy,
    demand: PlacementDemand,
    views: Sequence[NodeView],
    context: PlacementContext,
    blocked_pairs: frozenset[NodePair],
) -> PlacementDecision | None:
    """Choose nodes without blocked pairs, and predict the latency there; None is to wait."""
    choice = choose_excluding_open_breakers(policy, demand, views, context, blocked_pairs)
    if choice is None:
        return None
    is_cached = choice.prefill is None and demand.needs_prefill
    return PlacementDecision(
        demand,
        choice,
        predict_latency(demand, choice, views, context),
        views,
        context.now,
        blocked_pairs,
        PrefillSite.LOCAL if is_cached else PrefillSite.HAND_OFF,
        PlacementReason.PREFIX_CACHED if is_cached else PlacementReason.MODE,
    )
