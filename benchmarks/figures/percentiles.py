"""Order statistics of a sample. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], q: float) -> float:
    """Return the q-th percentile (0 to 100), interpolated linearly between closest ranks.

    This is Hyndman and Fan's type 7, numpy's default. Raises ValueError for an empty sample.
    """
    if not values:
        raise ValueError("an empty sample has no percentiles")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * q / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


@dataclass(frozen=True, slots=True)
class PercentileSummary:
    """Percentiles of a sample, in the sample's unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def summarize(values: Sequence[float]) -> PercentileSummary | None:
    """Return the percentiles, or None for an empty sample."""
    if not values:
        return None
    p50, p90, p99 = (percentile(values, q) for q in (50, 90, 99))
    return PercentileSummary(
        len(values), math.fsum(values) / len(values), p50, p90, p99, max(values)
    )
