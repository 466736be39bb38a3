"""Graceful degradation: what the cluster gives up, in this order, while requests wait longer than they should, and
takes back in the opposite one.

    shed_lowest           new requests of the lowest class are refused
    smaller_token_budget  tenants with a limit on tokens get half of it
    capped_output         new requests get at most so many tokens
    local_prefill_only    hand-offs, which fail, are given up: decode nodes compute every prompt

*Pressure* is the longest wait of a request that was not placed yet, over what its class may wait (see `Strain`). At 1
and more for `ENGAGE` seconds the next step is taken that can help; each step has as long to act before the next one. At
`LOW` and less for `RELEASE` seconds the last one is taken back. Between the two nothing changes, and both begin anew:
what a load near the limit does, it does once.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

HIGH, LOW = 1.0, 0.5
ENGAGE, RELEASE = 3.0, 10.0  # seconds
PERIOD = 0.5  # seconds between two readings


class Step(Enum):
    SHED_LOWEST = "shed_lowest"
    SMALLER_TOKEN_BUDGET = "smaller_token_budget"
    CAPPED_OUTPUT = "capped_output"
    LOCAL_PREFILL_ONLY = "local_prefill_only"


@dataclass(frozen=True, slots=True)
class Reading:
    """`pressure` None: requests wait for nodes, not for their turn. `cannot_help`: why a step would change nothing; one
    that is not among them can."""

    pressure: float | None
    cannot_help: Mapping[Step, str]


@dataclass(frozen=True, slots=True)
class Change:
    """For the log and the metrics."""

    step: Step
    taken: bool
    pressure: float


class Degradation:
    def __init__(self) -> None:
        self.active: dict[Step, float] = {}  # since when; in the order in which they were taken
        self.last = Reading(0.0, {})
        self.counts: Counter[tuple[str, str]] = Counter()  # step, taken or taken_back
        self._high_since: float | None = None
        self._low_since: float | None = None
        self._read_at: float | None = None

    def __contains__(self, step: Step) -> bool:
        return step in self.active

    def is_due(self, now: float) -> bool:
        return self._read_at is None or now >= self._read_at + PERIOD

    def next(self, *, waiting: bool) -> float | None:
        """When it is to be read next, if nothing else happens. `waiting`: somebody is."""
        if not waiting and not self.active:
            return None
        return self._read_at + PERIOD if self._read_at is not None else None

    def read(self, reading: Reading, now: float) -> Change | None:
        """What follows from a reading, at most one step."""
        self.last, self._read_at = reading, now
        pressure = reading.pressure
        high = pressure is not None and pressure >= HIGH
        low = pressure is not None and pressure <= LOW
        self._high_since = (now if self._high_since is None else self._high_since) if high else None
        self._low_since = (now if self._low_since is None else self._low_since) if low else None
        if pressure is not None and self._high_since is not None and now - self._high_since >= ENGAGE:
            return self._take(pressure, now)
        if pressure is not None and self._low_since is not None and now - self._low_since >= RELEASE:
            return self._take_back(pressure, now)
        return None

    def _take(self, pressure: float, now: float) -> Change | None:
        step = next((step for step in Step if step not in self.active and step not in self.last.cannot_help), None)
        if step is None:
            return None
        self.active[step] = self._high_since = now
        self.counts[step.value, "taken"] += 1
        return Change(step, True, pressure)

    def _take_back(self, pressure: float, now: float) -> Change | None:
        if not self.active:
            return None
        step, _ = self.active.popitem()
        self._low_since = now
        self.counts[step.value, "taken_back"] += 1
        return Change(step, False, pressure)
