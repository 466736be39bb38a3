"""What a profile says about the steps of an engine: idle time between them, and launches. Pure."""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Calls of CUDA's runtime and driver that launch a kernel or a graph of kernels.
_LAUNCH = re.compile(r"cu(da)?(Graph)?Launch")
# Kernels that one call has launched: with so many, it was the launch of a captured step.
_LEAST_GRAPH_KERNELS = 8


@dataclass(frozen=True, slots=True)
class DeviceActivity:
    """A kernel or a copy on the device. Times are in seconds, on one clock."""

    began: float
    ended: float
    correlation: int  # equal for what one call of the host has launched


@dataclass(frozen=True, slots=True)
class StepProfile:
    """What was recorded of several steps of one kind."""

    steps: int
    activities: Sequence[DeviceActivity]
    host_calls: Sequence[str]  # names of the calls of CUDA

    @property
    def launches_per_step(self) -> float:
        return count_launches(self.host_calls) / self.steps


def count_launches(host_calls: Iterable[str]) -> int:
    """Count the launches of kernels and of graphs."""
    return sum(bool(_LAUNCH.match(name)) for name in host_calls)


def find_idle_gaps(activities: Sequence[DeviceActivity]) -> list[float]:
    """Return the idle seconds between each captured step and the next one.

    A captured step is what one launch of a graph has run. Between two of them, the device copies
    inputs and tokens; only the time without any activity counts.
    """
    graphs = _find_graphs(activities)
    gaps = []
    for (_, ended), (began, _) in itertools.pairwise(graphs):
        between = [
            (max(activity.began, ended), min(activity.ended, began))
            for activity in activities
            if activity.ended > ended and activity.began < began
        ]
        gaps.append(max(0.0, began - ended - _measure_union(between)))
    return gaps


def _find_graphs(activities: Sequence[DeviceActivity]) -> list[tuple[float, float]]:
    """Begin and end of each captured step, in their order."""
    by_call: dict[int, list[DeviceActivity]] = defaultdict(list)
    for activity in activities:
        by_call[activity.correlation].append(activity)
    return sorted(
        (min(kernel.began for kernel in kernels), max(kernel.ended for kernel in kernels))
        for kernels in by_call.values()
        if len(kernels) >= _LEAST_GRAPH_KERNELS
    )


def _measure_union(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds that at least one interval covers."""
    covered, reached = 0.0, float("-inf")
    for began, ended in sorted(intervals):
        covered += max(0.0, ended - max(began, reached))
        reached = max(reached, ended)
    return covered
