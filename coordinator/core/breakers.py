"""A circuit breaker for each pair of a prefill and a decode node (Nygard, "Release It!", 2007).

    CLOSED ---- `TRIP` hand-offs in a row failed ----> OPEN ---- it has cooled down ----> HALF_OPEN
       ^                                                ^                                  |    |
       |                                                +------- the probe failed ---------+    |
       +-------------------------------- the probe was committed -------------------------------+

While a pair is not CLOSED, placement keeps its two nodes apart; each goes on with others. HALF_OPEN lets one attempt
through, the probe. An attempt that ends for any other reason (its client went away, decode had no room) says nothing
about the pair: a probe that does so makes way for another. A node that joins anew comes with a clean record.
"""

from dataclasses import dataclass
from enum import Enum

from baton.types import AttemptKey, Incarnation

TRIP = 3  # failures in a row
FIRST_REST, LONGEST_REST = 1.0, 4.0  # seconds before a pair is tried again; doubled each time

Pair = tuple[Incarnation, Incarnation]  # prefill, decode


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True)
class _Breaker:
    state: BreakerState = BreakerState.CLOSED
    failures: int = 0  # in a row
    rest: float = FIRST_REST
    until: float = 0.0  # of OPEN
    probe: AttemptKey | None = None  # of HALF_OPEN

    def open(self, now: float) -> None:
        self.state, self.probe = BreakerState.OPEN, None
        self.until = now + self.rest
        self.rest = min(2 * self.rest, LONGEST_REST)


class Breakers:
    """Pairs that never failed, and those whose last hand-off was committed, take no memory."""

    def __init__(self) -> None:
        self._pairs: dict[Pair, _Breaker] = {}
        self._apart: frozenset[Pair] = frozenset()

    @property
    def apart(self) -> frozenset[Pair]:
        """Pairs that must not be placed together now."""
        return self._apart

    def state(self, pair: Pair) -> BreakerState:
        found = self._pairs.get(pair)
        return found.state if found else BreakerState.CLOSED

    def count(self, state: BreakerState) -> int:
        return sum(breaker.state is state for breaker in self._pairs.values())

    def placed(self, pair: Pair, key: AttemptKey) -> bool:
        """A hand-off between them is to begin. Is it the probe?"""
        breaker = self._pairs.get(pair)
        if breaker is None or breaker.state is not BreakerState.HALF_OPEN or breaker.probe is not None:
            return False
        breaker.probe = key
        self._look()
        return True

    def failed(self, pair: Pair, key: AttemptKey, now: float) -> bool:
        """A hand-off failed between them, and not because of its client. Has the breaker opened?"""
        breaker = self._pairs.setdefault(pair, _Breaker())
        breaker.failures += 1
        trips = breaker.state is BreakerState.CLOSED and breaker.failures >= TRIP
        if not trips and not (breaker.state is BreakerState.HALF_OPEN and breaker.probe == key):
            return False
        breaker.open(now)
        self._look()
        return True

    def committed(self, pair: Pair, key: AttemptKey) -> bool:
        """A hand-off went through. Has the breaker closed? What began before it opened does not decide."""
        breaker = self._pairs.get(pair)
        if breaker is None:
            return False
        closes = breaker.state is BreakerState.HALF_OPEN and breaker.probe == key
        if closes or breaker.state is BreakerState.CLOSED:
            del self._pairs[pair]
            self._look()
        return closes

    def left(self, pair: Pair, key: AttemptKey) -> bool:
        """The attempt is over, whatever came of it. Was it a probe without a verdict, so that another may try?"""
        breaker = self._pairs.get(pair)
        if breaker is None or breaker.probe != key:
            return False
        breaker.probe = None
        self._look()
        return True

    def due(self, now: float) -> list[Pair]:
        """Those that have cooled down: one attempt each may be placed."""
        found = [
            pair for pair, breaker in self._pairs.items() if breaker.state is BreakerState.OPEN and now >= breaker.until
        ]
        for pair in found:
            self._pairs[pair].state = BreakerState.HALF_OPEN
        if found:
            self._look()
        return found

    def next(self) -> float | None:
        opened = (breaker.until for breaker in self._pairs.values() if breaker.state is BreakerState.OPEN)
        return min(opened, default=None)

    def forget(self, node: Incarnation) -> None:
        """It is no member any more."""
        self._pairs = {pair: breaker for pair, breaker in self._pairs.items() if node not in pair}
        self._look()

    def _look(self) -> None:
        self._apart = frozenset(
            pair
            for pair, breaker in self._pairs.items()
            if breaker.state is BreakerState.OPEN or breaker.probe is not None
        )
