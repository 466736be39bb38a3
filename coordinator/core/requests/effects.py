"""What the core asks its shell to do, in order, collected until the shell takes it."""

from baton.types import Incarnation
from coordinator.core.common.messages import Effect, NodeOrder, SendOrder


class EffectLog:
    def __init__(self) -> None:
        self._effects: list[Effect] = []

    def append_effect(self, effect: Effect) -> None:
        self._effects.append(effect)

    def send_order(self, node: Incarnation, order: NodeOrder) -> None:
        self._effects.append(SendOrder(node, order))

    def take_effects(self) -> list[Effect]:
        """Return the effects that have collected since the last call, oldest first."""
        effects, self._effects = self._effects, []
        return effects
