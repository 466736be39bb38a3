"""Graceful degradation: steps that are taken in order while requests wait too long.

They are taken back in the opposite order:

    shed_lowest           new requests of the lowest class are refused
    smaller_token_budget  tenants with a limit on tokens get half of it
    capped_output         new requests get at most so many tokens
    local_prefill_only    hand-offs, which fail, are given up: decode nodes compute every prompt

*Pressure* is the longest wait of a request that was not placed yet, over what its class may wait
(see `PressureMonitor`). After `ENGAGE_SECONDS` seconds at `HIGH_PRESSURE` or more the next step
that can help is taken, and each step has as long to act before the next one. After
`RELEASE_SECONDS` seconds at `LOW_PRESSURE` or less the last step is taken back. Between the two
nothing changes, and both times start again, so a load near the limit does not make steps flap.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

HIGH_PRESSURE, LOW_PRESSURE = 1.0, 0.5
ENGAGE_SECONDS, RELEASE_SECONDS = 3.0, 10.0  # seconds
SAMPLE_PERIOD_SECONDS = 0.5  # between two samples


class DegradationStep(Enum):
    """The steps, in the order in which they are taken."""

    SHED_LOWEST = "shed_lowest"
    SMALLER_TOKEN_BUDGET = "smaller_token_budget"
    CAPPED_OUTPUT = "capped_output"
    LOCAL_PREFILL_ONLY = "local_prefill_only"


@dataclass(frozen=True, slots=True)
class PressureSample:
    """How long requests wait for their turn, relative to what they may wait."""

    pressure: float | None  # None: requests wait for nodes, not for their turn
    unhelpful_steps: Mapping[DegradationStep, str]  # why each of these steps would not help


@dataclass(frozen=True, slots=True)
class DegradationChange:
    """A step that was taken or taken back, for the log and metrics."""

    step: DegradationStep
    is_taken: bool
    pressure: float


class DegradationController:
    """Takes steps, and takes them back, as samples of the pressure say."""

    def __init__(self) -> None:
        # since when each step is taken, in the order in which they were taken
        self.active_steps: dict[DegradationStep, float] = {}
        self.last_sample = PressureSample(0.0, {})
        self.change_counts: Counter[tuple[str, str]] = Counter()  # step, taken or taken_back
        self._high_since: float | None = None
        self._low_since: float | None = None
        self.sample_due_at = -math.inf  # when `apply_sample` is to be called

    def next_sample_at(self, *, waiting: bool) -> float | None:
        """Return when the pressure is to be sampled next; None while there is no need to.

        It is sampled while requests wait or a degradation step is active.
        """
        if not waiting and not self.active_steps:
            return None
        return self.sample_due_at if self.sample_due_at > -math.inf else None

    def apply_sample(self, sample: PressureSample, now: float) -> DegradationChange | None:
        """Take, or take back, at most one step."""
        self.last_sample, self.sample_due_at = sample, now + SAMPLE_PERIOD_SECONDS
        pressure = sample.pressure
        high = pressure is not None and pressure >= HIGH_PRESSURE
        low = pressure is not None and pressure <= LOW_PRESSURE
        self._high_since = (now if self._high_since is None else self._high_since) if high else None
        self._low_since = (now if self._low_since is None else self._low_since) if low else None
        if (
            pressure is not None
            and self._high_since is not None
            and now - self._high_since >= ENGAGE_SECONDS
        ):
            return self._take_next_step(pressure, now)
        if (
            pressure is not None
            and self._low_since is not None
            and now - self._low_since >= RELEASE_SECONDS
        ):
            return self._take_last_step_back(pressure, now)
        return None

    def _take_next_step(self, pressure: float, now: float) -> DegradationChange | None:
        step = next(
            (
                step
                for step in DegradationStep
                if step not in self.active_steps and step not in self.last_sample.unhelpful_steps
            ),
            None,
        )
        if step is None:
            return None
        self.active_steps[step] = self._high_since = now
        self.change_counts[step.value, "taken"] += 1
        return DegradationChange(step, True, pressure)

    def _take_last_step_back(self, pressure: float, now: float) -> DegradationChange | None:
        if not self.active_steps:
            return None
        step, _ = self.active_steps.popitem()
        self._low_since = now
        self.change_counts[step.value, "taken_back"] += 1
        return DegradationChange(step, False, pressure)
