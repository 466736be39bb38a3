"""What placement expects of an attempt, whatever policy chose its nodes: kept until it is known how it went."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from coordinator.core.breakers import Pair
from coordinator.core.placement import Choice, Demand, NodeView, Outlook


class Way(Enum):
    """Who computes the prompt: a prefill node that hands it over (or answers alone), or the decode node itself."""

    HAND_OFF = "hand_off"
    LOCAL = "local"


class Why(Enum):
    MODE = "mode"  # leaves no choice
    NO_PREFILL_NODE = "no_prefill_node"  # serves, although the mode provides for hand-offs
    PREFILL_TOO_SMALL = "prefill_too_small"  # prefill nodes serve, and none of them can hold the context
    HELD = "held"  # a decode node's cache has the context
    SOONER = "sooner"  # by prediction
    FAILED = "failed"  # the other way would go through more of the nodes at which the last attempt failed
    DEGRADED = "degraded"  # hand-offs are given up for the time being


@dataclass(frozen=True, slots=True)
class Prediction:
    """In seconds: `queue` before the prompt is begun, `prefill` to compute it, `transfer` of the hand-off that no
    computing hides, `step` of decode. `resident`: tokens that it will have in a cache, on average."""

    queue: float
    prefill: float
    transfer: float
    step: float
    output_tokens: float
    resident: float

    @property
    def first_token(self) -> float:
        """Seconds until it."""
        return self.queue + self.prefill + self.transfer


@dataclass(frozen=True, slots=True)
class Decision:
    """One placement. `views` are the nodes as they were seen, `apart` pairs of them that were not to be chosen; `other`
    is what was predicted of the way that was not taken, if it was open."""

    demand: Demand
    choice: Choice
    prediction: Prediction
    views: Sequence[NodeView]
    now: float
    apart: frozenset[Pair] = frozenset()
    way: Way = Way.HAND_OFF
    why: Why = Why.MODE
    other: Prediction | None = None


def predict(demand: Demand, choice: Choice, nodes: Sequence[NodeView], outlook: Outlook) -> Prediction:
    prefill = decode = None
    for view in nodes:
        if view.incarnation == choice.prefill:
            prefill = view
        elif view.incarnation == choice.decode:
            decode = view
    costs, tokens, output = outlook.costs, demand.tokens, demand.output
    queue = compute = transfer = step = 0.0
    computes = prefill or decode
    if computes is not None:
        held = demand.held_by(computes.incarnation) if computes.incarnation != demand.holder else tokens - 1
        queue = computes.wait(outlook.now)
        compute = costs.node(computes.name).prefill(tokens - held, held)
        if prefill is None:
            compute = outlook.beside(computes, compute)
    if prefill is not None and decode is not None:
        lacking = tokens - demand.held_by(decode.incarnation)
        transfer = costs.link(prefill.name, decode.name, lacking * outlook.token_bytes)
    resident = tokens + output / 2
    if decode is not None:
        step = costs.node(decode.name).step(decode.attempts + 1, decode.resident_tokens + resident)
    return Prediction(queue, compute, transfer, step, output, resident)
