"""The decision of one placement, with its predicted latency, kept until the outcome is known."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from coordinator.core.placement.breakers import NodePair
from coordinator.core.placement.interface import (
    NodeChoice,
    NodeView,
    PlacementContext,
    PlacementDemand,
)


class PrefillSite(Enum):
    """Where the prompt is computed."""

    HAND_OFF = "hand_off"  # a prefill node, which hands it off or answers alone
    LOCAL = "local"  # the decode node itself


class PlacementReason(Enum):
    """Why the prompt is computed there."""

    MODE = "mode"  # the mode leaves no choice
    NO_PREFILL_NODE = "no_prefill_node"  # no prefill node serves, although the mode has hand-offs
    # no prefill node that serves can hold the context
    PREFILL_TOO_SMALL = "prefill_too_small"
    PREFIX_CACHED = "held"  # a decode node's cache has the context
    SOONER = "sooner"  # it is predicted to end sooner
    # the other way would go through more of the nodes at which the last attempt failed
    FAILED_BEFORE = "failed"
    DEGRADED = "degraded"  # hand-offs are suspended by a degradation step


@dataclass(frozen=True, slots=True)
class LatencyPrediction:
    """The predicted latency of one attempt, in seconds."""

    queue_seconds: float  # before the prompt is begun
    prefill_seconds: float
    transfer_seconds: float  # of the hand-off, as far as computing does not hide it
    step_seconds: float  # of a decode step
    output_tokens: float
    resident_tokens: float  # tokens that it will have in a cache, on average

    @property
    def ttft_seconds(self) -> float:
        """Predicted time to first token, in seconds."""
        return self.queue_seconds + self.prefill_seconds + self.transfer_seconds


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """One placement."""

    demand: PlacementDemand
    choice: NodeChoice
    prediction: LatencyPrediction
    views: Sequence[NodeView]  # the nodes as they were seen
    now: float
    blocked_pairs: frozenset[NodePair] = frozenset()  # pairs that were not to be chosen
    prefill_site: PrefillSite = PrefillSite.HAND_OFF
    reason: PlacementReason = PlacementReason.MODE
    # of the other prefill site, if it was possible
    rejected_prediction: LatencyPrediction | None = None


def predict_latency(
    demand: PlacementDemand,
    choice: NodeChoice,
    nodes: Sequence[NodeView],
    outlook: PlacementContext,
) -> LatencyPrediction:
    """Predict the latency of the demand on the chosen nodes."""
    prefill = decode = None
    for view in nodes:
        if view.incarnation == choice.prefill:
            prefill = view
        elif view.incarnation == choice.decode:
            decode = view
    costs, tokens, output = outlook.cost_model, demand.context_tokens, demand.expected_output_tokens
    queue = compute = transfer = step = 0.0
    computes = prefill or decode
    if computes is not None:
        held = (
            demand.cached_tokens_on(computes.incarnation)
            if computes.incarnation != demand.prefix_holder
            else tokens - 1
        )
        queue = computes.queue_wait_seconds(outlook.now)
        compute = costs.get_node_costs(computes.name).prefill_seconds(tokens - held, held)
        if prefill is None:
            compute = outlook.interleaved_prefill_seconds(computes, compute)
    if prefill is not None and decode is not None:
        lacking = tokens - demand.cached_tokens_on(decode.incarnation)
        transfer = costs.transfer_seconds(prefill.name, decode.name, lacking * outlook.token_bytes)
    resident = tokens + output / 2
    if decode is not None:
        step = costs.get_node_costs(decode.name).step_seconds(
            decode.attempts + 1, decode.resident_tokens + resident
        )
    return LatencyPrediction(queue, compute, transfer, step, output, resident)
