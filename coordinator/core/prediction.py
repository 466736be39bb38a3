"""What placement expects of an attempt, whatever policy chose its nodes: kept until it is known how it went."""

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.core.breakers import Pair
from coordinator.core.placement import Choice, Demand, NodeView, Outlook


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


@dataclass(frozen=True, slots=True)
class Decision:
    """One placement. `views` are the nodes as they were seen, `apart` pairs of them that were not to be chosen."""

    demand: Demand
    choice: Choice
    prediction: Prediction
    views: Sequence[NodeView]
    now: float
    apart: frozenset[Pair] = frozenset()


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
    if prefill is not None and decode is not None:
        lacking = tokens - demand.held_by(decode.incarnation)
        transfer = costs.link(prefill.name, decode.name, lacking * outlook.token_bytes)
    resident = tokens + output / 2
    if decode is not None:
        step = costs.node(decode.name).step(decode.attempts + 1, decode.resident_tokens + resident)
    return Prediction(queue, compute, transfer, step, output, resident)
