"""Feeds the circuit breakers with the outcomes of hand-offs, and announces their changes."""

from baton.errors import HandoffFailed, StaleMessage
from coordinator.core.common.counters import Counters
from coordinator.core.common.effects import BreakerChanged, EffectLog, PlacementSignal
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.placement.breakers import CircuitBreakers, NodePair
from coordinator.core.requests.record import Attempt


class HandoffBreakers:
    """Each change of a breaker is counted, logged, and lets waiting requests be placed."""

    def __init__(
        self,
        registry: NodeRegistry,
        breakers: CircuitBreakers,
        counters: Counters,
        effects: EffectLog,
        signal: PlacementSignal,
    ) -> None:
        self._registry = registry
        self._breakers = breakers
        self._counters = counters
        self._effects = effects
        self._signal = signal

    def record_commit(self, attempt: Attempt) -> None:
        """Decode has committed the attempt's hand-off, if it had one."""
        pair = attempt.node_pair
        if (
            pair is not None
            and attempt.transport
            and self._breakers.record_commit(pair, attempt.key)
        ):
            self._announce(pair)

    def record_failure(self, attempt: Attempt, error: HandoffFailed, now: float) -> None:
        """Count a failed hand-off against its pair of nodes, unless it is only stale: that says
        nothing about their link."""
        pair = attempt.node_pair
        if (
            pair is not None
            and not isinstance(error, StaleMessage)
            and self._breakers.record_failure(pair, attempt.key, now)
        ):
            self._announce(pair)

    def abandon_probe(self, attempt: Attempt) -> None:
        """The attempt has ended: if it was a probe without a result, another one may follow."""
        pair = attempt.node_pair
        if pair is not None and self._breakers.abandon_probe(pair, attempt.key):
            self._signal.request_pass()

    def half_open_due_pairs(self, now: float) -> None:
        """Half-open the breakers whose cool-down is over."""
        for pair in self._breakers.half_open_due_pairs(now):
            self._announce(pair)

    def _announce(self, pair: NodePair) -> None:
        state = self._breakers.get_state(pair)
        self._counters.breaker_changes[state.value] += 1
        self._signal.request_pass()
        prefill, decode = (self._registry.name_of(node) for node in pair)
        self._effects.append_effect(BreakerChanged(prefill, decode, state))
