"""What `compare` sends, what counts as good, and the conclusions. Pure; times in seconds."""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from baton.slo import Slo
from benchmarks.figures.percentiles import percentile
from benchmarks.load.measurement import RequestMeasurement
from benchmarks.load.request_plan import PlannedRequest, poisson_times

SLO_SLACK = 2.0  # the SLO is so many times the idle latency
LOSS_THRESHOLD = 0.05  # share of the goodput; a smaller difference is no loss
DISAGGREGATED, COLOCATED, AUTO = "disaggregated", "colocated", "auto"


@dataclass(frozen=True, slots=True)
class ComparisonWorkload:
    """Lengths of prompts and answers."""

    name: str
    prompt_lengths: tuple[int, ...]  # tokens; prompts have these lengths in turn
    output_tokens: int  # of every answer


COMPARISON_WORKLOADS = (
    ComparisonWorkload("short", (128,), 64),
    ComparisonWorkload("mixed", (*[128] * 7, 2048), 64),
    ComparisonWorkload("long", (1536,), 32),
)


@dataclass(frozen=True, slots=True)
class IdleLatency:
    """Median latencies of requests on an idle system."""

    ttft: float  # seconds
    tpot: float  # seconds

    def request_seconds(self, output: int) -> float:
        return self.ttft + (output - 1) * self.tpot


@dataclass(frozen=True, slots=True)
class ComparisonCell:
    """One load of a workload."""

    workload: str
    load: float  # requests in the time that one takes when it is alone

    def __str__(self) -> str:
        return f"{self.workload}/{self.load:g}"


def idle_latency(measurements: Sequence[RequestMeasurement]) -> IdleLatency:
    """Return the median latencies. Raises ValueError if a request failed or had a single token."""
    failed = next(
        (
            measurement.error or "no tokens"
            for measurement in measurements
            if measurement.error or not measurement.token_arrivals
        ),
        "",
    )
    tpots = [
        measurement.tpot
        for measurement in measurements
        if measurement.token_arrivals and measurement.tpot is not None
    ]
    if failed or len(tpots) < len(measurements):
        raise ValueError(f"a request on an idle system failed: {failed or 'it had one token'}")
    return IdleLatency(
        percentile([measurement.ttft for measurement in measurements], 50), percentile(tpots, 50)
    )


def best_idle_latency(
    by_system: Mapping[str, Mapping[int, IdleLatency]], fixed: Sequence[str]
) -> dict[int, IdleLatency]:
    """Return the better latencies of the fixed systems for each prompt length."""
    lengths = {length for name in fixed for length in by_system[name]}
    return {
        length: IdleLatency(
            min(by_system[name][length].ttft for name in fixed),
            min(by_system[name][length].tpot for name in fixed),
        )
        for length in sorted(lengths)
    }


def slos_by_length(idle: Mapping[int, IdleLatency]) -> dict[int, Slo]:
    """Return the SLO of each prompt length."""
    return {
        length: Slo(SLO_SLACK * latency.ttft, SLO_SLACK * latency.tpot)
        for length, latency in idle.items()
    }


def arrival_rate(
    workload: ComparisonWorkload, load: float, idle: Mapping[int, IdleLatency]
) -> float:
    """Return the requests per second of a load."""
    alone = sum(
        idle[length].request_seconds(workload.output_tokens) for length in workload.prompt_lengths
    ) / len(workload.prompt_lengths)
    return load / alone


def plan_arrivals(
    workload: ComparisonWorkload, per_second: float, seconds: float, seed: str
) -> list[PlannedRequest]:
    """Return Poisson arrivals; the same seed gives the same plan."""
    random_source = random.Random(seed)
    lengths = itertools.cycle(workload.prompt_lengths)
    times = itertools.takewhile(lambda at: at < seconds, poisson_times(per_second, random_source))
    return [
        PlannedRequest(
            at, next(lengths), workload.output_tokens, random_source.getrandbits(63), salt=seed
        )
        for at in times
    ]


def compute_goodput(
    measurements: Sequence[RequestMeasurement], bounds: Mapping[int, Slo], seconds: float
) -> float:
    """Return the requests per second that succeeded within the SLO of their prompt length."""
    good = sum(
        bounds[measurement.requested_prompt_tokens].is_met(measurement.ttft, measurement.tpot)
        for measurement in measurements
        if not measurement.error and measurement.token_arrivals
    )
    return good / seconds


@dataclass(frozen=True, slots=True)
class GoodputRounds:
    """The goodput of one cell on one system in each round."""

    rounds: tuple[float, ...]  # requests per second

    @property
    def median(self) -> float:
        return percentile(self.rounds, 50)

    @property
    def spread(self) -> float:
        """The highest minus the lowest, as a share of the median; 0 for a median of 0."""
        return (max(self.rounds) - min(self.rounds)) / self.median if self.median else 0.0


GoodputBySystem = Mapping[str, Mapping[ComparisonCell, GoodputRounds]]


def peak_goodput(results: GoodputBySystem, system: str, workload: str) -> float:
    """Return the highest goodput of a system over the loads of a workload."""
    return max(
        goodput.median for cell, goodput in results[system].items() if cell.workload == workload
    )


def share_of_best_other(results: GoodputBySystem, system: str, value: Mapping[str, float]) -> float:
    """Return the system's value over the best other value; 1 if that is 0."""
    best = max(value[other] for other in results if other != system)
    return value[system] / best if best else 1.0


def losing_cells(
    results: GoodputBySystem, loser: str, winner: str
) -> Iterator[tuple[ComparisonCell, float]]:
    """Yield the cells in which `loser` has less goodput than `winner`, and the share it has.

    Differences within LOSS_THRESHOLD do not count.
    """
    for cell, other in results[winner].items():
        share = results[loser][cell].median / other.median if other.median else 1.0
        if share < 1.0 - LOSS_THRESHOLD:
            yield cell, share
