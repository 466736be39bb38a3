"""Decides where a prompt is computed: conditional disaggregation.

In mode `auto` both sites are predicted for each attempt, and the one that ends sooner is chosen:

    hand_off   wait + prefill(context - cached, cached) + link              + output x step
    local      wait + interleaved(prefill(context - cached, cached))        + output x step

A prompt that a decode node computes may lengthen the steps of its running sequences by `share` and
no more, but for a burst (node_engine/core/scheduling/prefill_token_budget.py). So the part that the
burst does not cover takes 1 + 1 / share times as long as on an idle node. Prompts that are handed
off disturb no sequence, so ties go to them. If no prefill node has room now, the hand-off is
predicted for the time when one will have, and the request waits if that is still sooner.
"""

from collections.abc import Sequence
from dataclasses import replace

from baton.types import Role
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
from coordinator.core.placement.policies import decide_nodes

TIE_SECONDS = 0.0005  # predictions that differ by less are equal


class DisaggregationPolicy:
    """Chooses the prefill site in mode `auto`, on the nodes that the placement policy chooses."""

    def __init__(self, placement: PlacementPolicy) -> None:
        self._placement = placement

    def decide_placement(
        self,
        demand: PlacementDemand,
        views: Sequence[NodeView],
        context: PlacementContext,
        blocked_pairs: frozenset[NodePair] = frozenset(),
    ) -> PlacementDecision | None:
        """Decide the nodes and the prefill site of a demand for prefill; None is to wait.

        `blocked_pairs` must not hand off.
        """
        hand_off = decide_nodes(self._placement, demand, views, context, blocked_pairs)
        if hand_off is not None and hand_off.reason is PlacementReason.PREFIX_CACHED:
            return hand_off
        local_demand = replace(demand, needs_prefill=False, needs_decode=True)
        local = decide_nodes(self._placement, local_demand, views, context, blocked_pairs)
        if hand_off is None or local is None:
            return self._decide_with_one_site(demand, hand_off, local, views, context)
        return _choose_sooner(demand, hand_off, local, context.cost_model.error_margin)

    def _decide_with_one_site(
        self,
        demand: PlacementDemand,
        hand_off: PlacementDecision | None,
        local: PlacementDecision | None,
        views: Sequence[NodeView],
        context: PlacementContext,
    ) -> PlacementDecision | None:
        """Decide when one of the two sites has no room now. A prefill node will have room when it
        has computed its prompts; for a decode node the time cannot be predicted."""
        if hand_off is not None or local is None:
            return (
                replace(hand_off, prefill_site=PrefillSite.HAND_OFF, reason=PlacementReason.SOONER)
                if hand_off
                else None
            )
        later = _predict_later_handoff(demand, local, views, context)
        if later is not None and not _is_sooner(
            local.prediction, later, context.cost_model.error_margin
        ):
            return None
        return replace(
            local,
            prefill_site=PrefillSite.LOCAL,
            reason=PlacementReason.SOONER,
            rejected_prediction=later,
        )


def completion_seconds(prediction: LatencyPrediction) -> float:
    """Return the predicted seconds until the output is complete."""
    return (
        prediction.ttft_seconds + max(0.0, prediction.output_tokens - 1.0) * prediction.step_seconds
    )


def _choose_sooner(
    demand: PlacementDemand, hand_off: PlacementDecision, local: PlacementDecision, margin: float
) -> PlacementDecision:
    avoided = _count_avoided(demand, hand_off.choice) - _count_avoided(demand, local.choice)
    if avoided > 0:
        return replace(
            local,
            prefill_site=PrefillSite.LOCAL,
            reason=PlacementReason.FAILED_BEFORE,
            rejected_prediction=hand_off.prediction,
        )
    if _is_sooner(local.prediction, hand_off.prediction, margin) and avoided == 0:
        return replace(
            local,
            prefill_site=PrefillSite.LOCAL,
            reason=PlacementReason.SOONER,
            rejected_prediction=hand_off.prediction,
        )
    reason = PlacementReason.FAILED_BEFORE if avoided < 0 else PlacementReason.SOONER
    return replace(
        hand_off,
        prefill_site=PrefillSite.HAND_OFF,
        reason=reason,
        rejected_prediction=local.prediction,
    )


def _is_sooner(local: LatencyPrediction, hand_off: LatencyPrediction, margin: float) -> bool:
    """Return whether local ends sooner by more than the usual prediction error. What both have in
    common does not count towards the error."""
    return completion_seconds(
        local
    ) + TIE_SECONDS + margin * local.ttft_seconds < completion_seconds(hand_off)


def _count_avoided(demand: PlacementDemand, choice: NodeChoice) -> int:
    return sum(node in demand.avoided_nodes for node in (choice.prefill, choice.decode))


def _predict_later_handoff(
    demand: PlacementDemand,
    local: PlacementDecision,
    views: Sequence[NodeView],
    context: PlacementContext,
) -> LatencyPrediction | None:
    """Predict a hand-off to the decode node of `local` from the prefill node that will have room
    first. None if no prefill node is only waiting for time."""
    cached_on_decode = demand.cached_tokens_on(local.choice.decode) if local.choice.decode else 0
    transfer_seconds = (
        context.cost_model.fleet_transfer_seconds(
            (demand.context_tokens - cached_on_decode) * context.token_bytes
        )
        if demand.needs_decode
        else 0.0
    )
    predictions: list[LatencyPrediction] = []
    for node in views:
        is_blocked = (node.incarnation, local.choice.decode) in local.blocked_pairs
        if node.role is Role.PREFILL and not (
            node.is_closed_to(demand)
            or not node.can_hold_request(demand)
            or node.incarnation in demand.avoided_nodes
            or is_blocked
        ):
            cached_tokens = demand.cached_tokens_on(node.incarnation)
            prefill_seconds = context.cost_model.get_node_costs(node.name).prefill_seconds(
                demand.context_tokens - cached_tokens, cached_tokens
            )
            predictions.append(
                replace(
                    local.prediction,
                    queue_seconds=node.queue_wait_seconds(context.now),
                    prefill_seconds=prefill_seconds,
                    transfer_seconds=transfer_seconds,
                )
            )
    return min(predictions, key=completion_seconds, default=None)
