"""What placement expects of an attempt, whatever policy chose its nodes: kept until it is known how
it went."""

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
    """Who computes the prompt: a prefill node that hands it over (or answers alone), or the decode
    node itself."""

    HAND_OFF = "hand_off"
    LOCAL = "local"


class PlacementReason(Enum):
    MODE = "mode"  # leaves no choice
    NO_PREFILL_NODE = "no_prefill_node"  # serves, although the mode provides for hand-offs
    PREFILL_TOO_SMALL = (
        "prefill_too_small"  # prefill nodes serve, and none of them can hold the context
    )
    PREFIX_CACHED = "held"  # a decode node's cache has the context
    SOONER = "sooner"  # by prediction
    # the other way would go through more of the nodes at which the last attempt failed
    FAILED_BEFORE = "failed"
    DEGRADED = "degraded"  # hand-offs are given up for the time being


@dataclass(frozen=True, slots=True)
class LatencyPrediction:
    """In seconds: `queue_seconds` before the prompt is begun, `prefill_seconds` to compute it,
    `transfer_seconds` of the hand-off that no computing hides, `step_seconds` of decode.
    `resident_tokens`: tokens that it will have in a cache, on average."""

    queue_seconds: float
    prefill_seconds: float
    transfer_seconds: float
    step_seconds: float
    output_tokens: float
    resident_tokens: float

    @property
    def ttft_seconds(self) -> float:
        """Seconds until it."""
        return self.queue_seconds + self.prefill_seconds + self.transfer_seconds


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """One placement. `views` are the nodes as they were seen, `blocked_pairs` pairs of them that
    were not to be chosen; `rejected_prediction` is what was predicted of the way that was not
    taken, if it was open."""

    demand: PlacementDemand
    choice: NodeChoice
    prediction: LatencyPrediction
    views: Sequence[NodeView]
    now: float
    blocked_pairs: frozenset[NodePair] = frozenset()
    prefill_site: PrefillSite = PrefillSite.HAND_OFF
    reason: PlacementReason = PlacementReason.MODE
    rejected_prediction: LatencyPrediction | None = None


def predict_latency(
    demand: PlacementDemand,
    choice: NodeChoice,
    nodes: Sequence[NodeView],
    outlook: PlacementContext,
) -> LatencyPrediction:
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
