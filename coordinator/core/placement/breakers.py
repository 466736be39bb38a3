"""A circuit breaker for each pair of a prefill and a decode node (Nygard, "Release It!", 2007).

    CLOSED -- FAILURES_TO_OPEN hand-offs in a row failed --> OPEN -- cooled down --> HALF_OPEN
       ^                                                      ^                        |   |
       |                                                      +--- the probe failed ---+   |
       +------------------------ the probe was committed ----------------------------------+

While a pair is not CLOSED, its two nodes are not placed together; each works with others. HALF_OPEN
lets one attempt through, the probe. An attempt that ends for another reason (its client left,
decode had no room) says nothing about the pair, and if it was the probe another one may follow. A
node that rejoins starts without failures.
"""

from collections.abc import Collection
from dataclasses import dataclass

from baton.types import AttemptKey, Incarnation
from coordinator.core.common.breaker_state import BreakerState

FAILURES_TO_OPEN = 3  # failures in a row
# before a pair is tried again; doubled each time
FIRST_COOLDOWN_SECONDS, MAX_COOLDOWN_SECONDS = 1.0, 4.0

NodePair = tuple[Incarnation, Incarnation]  # prefill, decode


@dataclass(slots=True)
class _PairBreaker:
    """The breaker of one pair of nodes."""

    state: BreakerState = BreakerState.CLOSED
    failures: int = 0  # failed hand-offs in a row
    cooldown_seconds: float = FIRST_COOLDOWN_SECONDS
    open_until: float = 0.0  # end of the cool-down, in state OPEN
    probe: AttemptKey | None = None  # the attempt that probes, in state HALF_OPEN

    def open_breaker(self, now: float) -> None:
        self.state, self.probe = BreakerState.OPEN, None
        self.open_until = now + self.cooldown_seconds
        self.cooldown_seconds = min(2 * self.cooldown_seconds, MAX_COOLDOWN_SECONDS)


class CircuitBreakers:
    """The breakers of all pairs; one that has not failed since its last commit takes no memory."""

    def __init__(self) -> None:
        self.blocked_pairs: frozenset[NodePair] = frozenset()  # not to be placed together now
        self._pairs: dict[NodePair, _PairBreaker] = {}
        self.failing_pairs: Collection[NodePair] = self._pairs.keys()  # failed since a commit

    def get_state(self, pair: NodePair) -> BreakerState:
        found = self._pairs.get(pair)
        return found.state if found else BreakerState.CLOSED

    def count_in_state(self, state: BreakerState) -> int:
        return sum(breaker.state is state for breaker in self._pairs.values())

    def try_start_probe(self, pair: NodePair, key: AttemptKey) -> bool:
        """A hand-off is about to start; return whether it is the probe of a half-open breaker."""
        breaker = self._pairs.get(pair)
        if (
            breaker is None
            or breaker.state is not BreakerState.HALF_OPEN
            or breaker.probe is not None
        ):
            return False
        breaker.probe = key
        self._update_blocked_pairs()
        return True

    def record_failure(self, pair: NodePair, key: AttemptKey, now: float) -> bool:
        """Record a failed hand-off; return whether the breaker has opened."""
        breaker = self._pairs.setdefault(pair, _PairBreaker())
        breaker.failures += 1
        trips = breaker.state is BreakerState.CLOSED and breaker.failures >= FAILURES_TO_OPEN
        if not trips and not (breaker.state is BreakerState.HALF_OPEN and breaker.probe == key):
            return False
        breaker.open_breaker(now)
        self._update_blocked_pairs()
        return True

    def record_commit(self, pair: NodePair, key: AttemptKey) -> bool:
        """Record a committed hand-off; return whether the breaker has closed. A half-open breaker
        closes only by its probe."""
        breaker = self._pairs.get(pair)
        if breaker is None:
            return False
        closes = breaker.state is BreakerState.HALF_OPEN and breaker.probe == key
        if closes or breaker.state is BreakerState.CLOSED:
            del self._pairs[pair]
            self._update_blocked_pairs()
        return closes

    def abandon_probe(self, pair: NodePair, key: AttemptKey) -> bool:
        """The attempt has ended. Return whether it was a probe without a result, so that another
        may probe."""
        breaker = self._pairs.get(pair)
        if breaker is None or breaker.probe != key:
            return False
        breaker.probe = None
        self._update_blocked_pairs()
        return True

    def half_open_due_pairs(self, now: float) -> list[NodePair]:
        """Half-open the breakers whose cool-down is over, and return their pairs."""
        found = [
            pair
            for pair, breaker in self._pairs.items()
            if breaker.state is BreakerState.OPEN and now >= breaker.open_until
        ]
        for pair in found:
            self._pairs[pair].state = BreakerState.HALF_OPEN
        if found:
            self._update_blocked_pairs()
        return found

    def next_half_open_at(self) -> float | None:
        opened = (
            breaker.open_until
            for breaker in self._pairs.values()
            if breaker.state is BreakerState.OPEN
        )
        return min(opened, default=None)

    def forget_node(self, node: Incarnation) -> None:
        """Drop the breakers of a node that has left the cluster."""
        for pair in [pair for pair in self._pairs if node in pair]:
            del self._pairs[pair]
        self._update_blocked_pairs()

    def _update_blocked_pairs(self) -> None:
        self.blocked_pairs = frozenset(
            pair
            for pair, breaker in self._pairs.items()
            if breaker.state is BreakerState.OPEN or breaker.probe is not None
        )
