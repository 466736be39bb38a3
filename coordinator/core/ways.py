"""Who computes a prompt: a prefill node that hands it over, or the decode node itself (*conditional disaggregation*).

In mode `auto` both are predicted for each attempt, and the one that ends sooner is taken:

    hand_off   wait + prefill(context - held, held) + link      + output x step
    local      wait + beside(prefill(context - held, held))     + output x step

`beside` is what the decode node's residents cost the prompt: it may make their steps longer by `share` and no more, but
for a burst (node_engine/core/prefill_allowance.py), so what the burst does not cover takes 1 + 1 / share times as long
as alone. Prompts that are handed over disturb nobody, so equal predictions are decided for them. Where no prefill node
has room at the moment, the hand-off is predicted for when one will, and the request waits if that is still sooner.
"""

from collections.abc import Sequence
from dataclasses import replace

from baton.types import Role
from coordinator.core.apart import choose_apart
from coordinator.core.breakers import Pair
from coordinator.core.placement import Choice, Demand, NodeView, Outlook, Placement
from coordinator.core.prediction import Decision, Prediction, Way, Why, predict

NEAR = 0.0005  # seconds: predictions so close are equal


class Ways:
    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def decide(
        self,
        demand: Demand,
        views: Sequence[NodeView],
        outlook: Outlook,
        why: Why,
        *,
        either: bool,
        apart: frozenset[Pair] = frozenset(),
    ) -> Decision | None:
        """With `either`, prefill and decode nodes may compute the prompt; else as the demand says, because of `why`.
        Pairs in `apart` do not hand over. None: wait."""
        first = self._decide(demand, views, outlook, apart)
        if first is not None and first.choice.prefill is None and demand.prefill:
            return replace(first, way=Way.LOCAL, why=Why.HELD)
        if not either:
            way = Way.HAND_OFF if demand.prefill else Way.LOCAL
            return replace(first, way=way, why=why) if first else None
        local = self._decide(replace(demand, prefill=False, decode=True), views, outlook, apart)
        if first is None or local is None:
            return self._with_one(demand, first, local, views, outlook)
        return _sooner(demand, first, local, outlook.costs.margin)

    def _decide(
        self, demand: Demand, views: Sequence[NodeView], outlook: Outlook, apart: frozenset[Pair]
    ) -> Decision | None:
        choice = choose_apart(self._placement, demand, views, outlook, apart)
        if choice is None:
            return None
        return Decision(demand, choice, predict(demand, choice, views, outlook), views, outlook.now, apart)

    def _with_one(
        self,
        demand: Demand,
        hand_off: Decision | None,
        local: Decision | None,
        views: Sequence[NodeView],
        outlook: Outlook,
    ) -> Decision | None:
        """One of them has no room now. A prefill node gets room when it has computed what it holds; when a decode node
        does, nobody knows."""
        if hand_off is not None or local is None:
            return replace(hand_off, way=Way.HAND_OFF, why=Why.SOONER) if hand_off else None
        later = _later(demand, local, views, outlook)
        if later is not None and not _is_sooner(local.prediction, later, outlook.costs.margin):
            return None
        return replace(local, way=Way.LOCAL, why=Why.SOONER, other=later)


def finish(one: Prediction) -> float:
    """Seconds until the answer is complete. Its first token comes with the prompt."""
    return one.first_token + max(0.0, one.output_tokens - 1.0) * one.step


def _sooner(demand: Demand, hand_off: Decision, local: Decision, margin: float) -> Decision:
    avoided = _avoided(demand, hand_off.choice) - _avoided(demand, local.choice)
    if avoided > 0:
        return replace(local, way=Way.LOCAL, why=Why.FAILED, other=hand_off.prediction)
    if _is_sooner(local.prediction, hand_off.prediction, margin) and avoided == 0:
        return replace(local, way=Way.LOCAL, why=Why.SOONER, other=hand_off.prediction)
    why = Why.FAILED if avoided < 0 else Why.SOONER
    return replace(hand_off, way=Way.HAND_OFF, why=why, other=local.prediction)


def _is_sooner(local: Prediction, hand_off: Prediction, margin: float) -> bool:
    """By more than predictions are usually off. What both have in common is no part of that."""
    return finish(local) + NEAR + margin * local.first_token < finish(hand_off)


def _avoided(demand: Demand, choice: Choice) -> int:
    return sum(node in demand.avoid for node in (choice.prefill, choice.decode))


def _later(demand: Demand, local: Decision, views: Sequence[NodeView], outlook: Outlook) -> Prediction | None:
    """Of a hand-off to the decode node of `local` from the prefill node that will first have computed what it holds,
    and then this. None if each of them lacks something else than time."""
    held_there = demand.held_by(local.choice.decode) if local.choice.decode else 0
    link = outlook.costs.any_link((demand.tokens - held_there) * outlook.token_bytes) if demand.decode else 0.0
    found: list[Prediction] = []
    for node in views:
        kept_apart = (node.incarnation, local.choice.decode) in local.apart
        if node.role is Role.PREFILL and not (
            node.is_closed_to(demand) or not node.can_hold(demand) or node.incarnation in demand.avoid or kept_apart
        ):
            held = demand.held_by(node.incarnation)
            compute = outlook.costs.node(node.name).prefill(demand.tokens - held, held)
            found.append(replace(local.prediction, queue=node.wait(outlook.now), prefill=compute, transfer=link))
    return min(found, key=finish, default=None)
