"""How well a node uses its device: model FLOPs utilisation and model bandwidth utilisation.

    MFU = flops of the steps / (busy time * peak rate of products of the device)
    MBU = bytes of the steps / (busy time * peak rate of the device's memory)

`step_costs.py` defines flops and bytes. The busy time of a step ends when its results are there. It
begins when the step before it has ended, or at its own start if the node had nothing to compute
before: steps may be launched before the one before them has ended, and what the host does between
two steps is time in which the device could compute.
"""

from collections import deque
from typing import NamedTuple

from node_engine.core.metrics.device_peaks import DevicePeaks, find_device_peaks
from node_engine.core.metrics.step_costs import (
    PARAMETER_BYTES,
    StepCosts,
    get_product_precision,
)
from node_engine.core.step.engine import Engine
from node_engine.core.step.step_batch import StepBatch

WINDOW_SECONDS = 10.0  # steps are recent for so long


class WorkTotals(NamedTuple):
    """Totals over all steps so far."""

    flops: float = 0.0
    memory_bytes: float = 0.0
    busy_seconds: float = 0.0


class Utilization(NamedTuple):
    """Shares of a device's peak rates; None if nothing was computed or the peak is not known."""

    mfu: float | None = None
    mbu: float | None = None


class WorkMeter:
    """Adds up the work of steps. Compute thread only, but for `totals`."""

    def __init__(self, costs: StepCosts | None) -> None:
        """`costs`: None if nobody wants to know."""
        self._costs = costs
        self._busy_until: float | None = None  # when the last step ended; None after a pause
        self.totals = WorkTotals()  # replaced by every step; any thread may read it

    def add_step(self, batch: StepBatch, started: float, ended: float) -> None:
        """Add a step that has computed `batch`, between these clock times."""
        if self._costs is None:
            return
        begun = started if self._busy_until is None else self._busy_until
        self._busy_until = ended
        work, totals = self._costs.measure_step(batch), self.totals
        self.totals = WorkTotals(
            totals.flops + work.flops,
            totals.memory_bytes + work.memory_bytes,
            totals.busy_seconds + ended - begun,
        )

    def pause(self) -> None:
        """There is no next step at the moment, or the last one has failed."""
        self._busy_until = None


class UtilizationWindow:
    """Computes the utilisation of recent steps from totals that are read now and then."""

    def __init__(self, peaks: DevicePeaks | None, precision: str) -> None:
        self._bytes_per_second = peaks.bytes_per_second if peaks else None
        self._flops_per_second = peaks.get_flops_per_second(precision) if peaks else None
        self._readings: deque[tuple[float, WorkTotals]] = deque()  # (clock time, totals)

    def observe(self, now: float, totals: WorkTotals) -> Utilization:
        """Return the utilisation of the steps since the reading of WINDOW_SECONDS ago."""
        readings = self._readings
        readings.append((now, totals))
        while len(readings) > 1 and readings[1][0] <= now - WINDOW_SECONDS:
            readings.popleft()
        before = readings[0][1]
        seconds = totals.busy_seconds - before.busy_seconds
        return Utilization(
            mfu=_share_of_peak(totals.flops - before.flops, seconds, self._flops_per_second),
            mbu=_share_of_peak(
                totals.memory_bytes - before.memory_bytes, seconds, self._bytes_per_second
            ),
        )


def _share_of_peak(amount: float, seconds: float, peak: float | None) -> float | None:
    return None if peak is None or seconds <= 0 else amount / (seconds * peak)


def make_step_costs(engine: Engine) -> StepCosts | None:
    """The costs of an engine's steps; None if its model, device or precision is not known."""
    size, identity = engine.model_size, engine.model_identity
    if size is None or find_device_peaks(engine.compute_device.name) is None:
        return None
    if get_product_precision(identity) not in PARAMETER_BYTES:
        return None
    return StepCosts(size, identity)
