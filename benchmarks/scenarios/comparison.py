"""What `compare` sends, what counts as good, and what follows from it. Pure; times in seconds."""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from baton.slo import Slo
from benchmarks.figures.percentiles import percentile
from benchmarks.load.measurement import RequestMeasurement
from benchmarks.load.request_plan import PlannedRequest, poisson_times

SLO_SLACK = 2.0  # times the idle figure
LOSS_THRESHOLD = 0.05  # of goodput: less is no loss
DISAGGREGATED, COLOCATED, AUTO = "disaggregated", "colocated", "auto"


@dataclass(frozen=True, slots=True)
class ComparisonWorkload:
    """Prompts have these lengths in turn; every answer has `output_tokens` tokens."""

    name: str
    prompt_lengths: tuple[int, ...]
    output_tokens: int


COMPARISON_WORKLOADS = (
    ComparisonWorkload("short", (128,), 64),
    ComparisonWorkload("mixed", (*[128] * 7, 2048), 64),
    ComparisonWorkload("long", (1536,), 32),
)


@dataclass(frozen=True, slots=True)
class IdleLatency:
    """Medians of requests that are alone."""

    ttft: float
    tpot: float

    def request_seconds(self, output: int) -> float:
        return self.ttft + (output - 1) * self.tpot


@dataclass(frozen=True, slots=True)
class ComparisonCell:
    """One load of a workload: `load` is the requests that arrive in the time that one takes when it
    is alone."""

    workload: str
    load: float

    def __str__(self) -> str:
        return f"{self.workload}/{self.load:g}"


def idle_latency(seen: Sequence[RequestMeasurement]) -> IdleLatency:
    """Raises ValueError if one of them failed or had a single token."""
    failed = next(
        (one.error or "no tokens" for one in seen if one.error or not one.token_arrivals), ""
    )
    tpots = [one.tpot for one in seen if one.token_arrivals and one.tpot is not None]
    if failed or len(tpots) < len(seen):
        raise ValueError(f"a request on an idle system failed: {failed or 'it had one token'}")
    return IdleLatency(percentile([one.ttft for one in seen], 50), percentile(tpots, 50))


def best_idle_latency(
    arms: Mapping[str, Mapping[int, IdleLatency]], fixed: Sequence[str]
) -> dict[int, IdleLatency]:
    """For each length of prompt, the better figures of the fixed systems."""
    lengths = {length for name in fixed for length in arms[name]}
    return {
        length: IdleLatency(
            min(arms[name][length].ttft for name in fixed),
            min(arms[name][length].tpot for name in fixed),
        )
        for length in sorted(lengths)
    }


def slos_by_length(idle: Mapping[int, IdleLatency]) -> dict[int, Slo]:
    """By length of prompt."""
    return {length: Slo(SLO_SLACK * one.ttft, SLO_SLACK * one.tpot) for length, one in idle.items()}


def arrival_rate(
    workload: ComparisonWorkload, load: float, idle: Mapping[int, IdleLatency]
) -> float:
    """Requests a second."""
    alone = sum(
        idle[length].request_seconds(workload.output_tokens) for length in workload.prompt_lengths
    ) / len(workload.prompt_lengths)
    return load / alone


def plan_arrivals(
    workload: ComparisonWorkload, per_second: float, seconds: float, seed: str
) -> list[PlannedRequest]:
    """Poisson arrivals; equal for every system."""
    source = random.Random(seed)
    lengths = itertools.cycle(workload.prompt_lengths)
    times = itertools.takewhile(lambda at: at < seconds, poisson_times(per_second, source))
    return [
        PlannedRequest(at, next(lengths), workload.output_tokens, source.getrandbits(63), salt=seed)
        for at in times
    ]


def compute_goodput(
    seen: Sequence[RequestMeasurement], bounds: Mapping[int, Slo], seconds: float
) -> float:
    """Requests a second of the offering that ended well within the bounds of their length."""
    good = sum(
        bounds[one.requested_prompt_tokens].is_met(one.ttft, one.tpot)
        for one in seen
        if not one.error and one.token_arrivals
    )
    return good / seconds


@dataclass(frozen=True, slots=True)
class GoodputRounds:
    """Of one cell on one system: each round's."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return percentile(self.rounds, 50)

    @property
    def spread(self) -> float:
        """Highest less lowest, as a share of the median; 0 for a median of 0."""
        return (max(self.rounds) - min(self.rounds)) / self.median if self.median else 0.0


GoodputBySystem = Mapping[str, Mapping[ComparisonCell, GoodputRounds]]  # by system


def peak_goodput(results: GoodputBySystem, system: str, workload: str) -> float:
    """The highest goodput over the loads of a workload."""
    return max(one.median for cell, one in results[system].items() if cell.workload == workload)


def share_of_best_other(results: GoodputBySystem, system: str, value: Mapping[str, float]) -> float:
    """A system's figure over the best of the others. 1 where nobody has anything."""
    best = max(value[other] for other in results if other != system)
    return value[system] / best if best else 1.0


def losing_cells(
    results: GoodputBySystem, loser: str, winner: str
) -> Iterator[tuple[ComparisonCell, float]]:
    """Cells in which one has less goodput than the other by more than LOSS, and what it has of
    it."""
    for cell, other in results[winner].items():
        share = results[loser][cell].median / other.median if other.median else 1.0
        if share < 1.0 - LOSS_THRESHOLD:
            yield cell, share
