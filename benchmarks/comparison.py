"""What `compare` sends, what counts as good, and what follows from it. Pure; times in seconds."""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from baton.slo import Slo
from benchmarks.measurement import Measurement
from benchmarks.percentiles import percentile
from benchmarks.schedule import Planned, arrivals

SLACK = 2.0  # times the idle figure
LOSS = 0.05  # of goodput: less is no loss
DISAGGREGATED, COLOCATED, AUTO = "disaggregated", "colocated", "auto"


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts have these lengths in turn; every answer has `output` tokens."""

    name: str
    prompts: tuple[int, ...]
    output: int


WORKLOADS = (
    Workload("short", (128,), 64),
    Workload("mixed", (*[128] * 7, 2048), 64),
    Workload("long", (1536,), 32),
)


@dataclass(frozen=True, slots=True)
class Idle:
    """Medians of requests that are alone."""

    ttft: float
    tpot: float

    def whole(self, output: int) -> float:
        return self.ttft + (output - 1) * self.tpot


@dataclass(frozen=True, slots=True)
class Cell:
    """One load of a workload: `load` is the requests that arrive in the time that one takes when it is alone."""

    workload: str
    load: float

    def __str__(self) -> str:
        return f"{self.workload}/{self.load:g}"


def idle_of(seen: Sequence[Measurement]) -> Idle:
    """Raises ValueError if one of them failed or had a single token."""
    failed = next((one.error or "no tokens" for one in seen if one.error or not one.arrivals), "")
    tpots = [one.tpot for one in seen if one.arrivals and one.tpot is not None]
    if failed or len(tpots) < len(seen):
        raise ValueError(f"a request on an idle system failed: {failed or 'it had one token'}")
    return Idle(percentile([one.ttft for one in seen], 50), percentile(tpots, 50))


def best_idle(arms: Mapping[str, Mapping[int, Idle]], fixed: Sequence[str]) -> dict[int, Idle]:
    """For each length of prompt, the better figures of the fixed systems."""
    lengths = {length for name in fixed for length in arms[name]}
    return {
        length: Idle(
            min(arms[name][length].ttft for name in fixed),
            min(arms[name][length].tpot for name in fixed),
        )
        for length in sorted(lengths)
    }


def slos(idle: Mapping[int, Idle]) -> dict[int, Slo]:
    """By length of prompt."""
    return {length: Slo(SLACK * one.ttft, SLACK * one.tpot) for length, one in idle.items()}


def rate(workload: Workload, load: float, idle: Mapping[int, Idle]) -> float:
    """Requests a second."""
    alone = sum(idle[length].whole(workload.output) for length in workload.prompts) / len(workload.prompts)
    return load / alone


def plan(workload: Workload, per_second: float, seconds: float, seed: str) -> list[Planned]:
    """Poisson arrivals; equal for every system."""
    source = random.Random(seed)
    lengths = itertools.cycle(workload.prompts)
    times = itertools.takewhile(lambda at: at < seconds, arrivals(per_second, source))
    return [Planned(at, next(lengths), workload.output, source.getrandbits(63), salt=seed) for at in times]


def goodput(seen: Sequence[Measurement], bounds: Mapping[int, Slo], seconds: float) -> float:
    """Requests a second of the offering that ended well within the bounds of their length."""
    good = sum(bounds[one.asked_prompt].met(one.ttft, one.tpot) for one in seen if not one.error and one.arrivals)
    return good / seconds


@dataclass(frozen=True, slots=True)
class Goodput:
    """Of one cell on one system: each round's."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return percentile(self.rounds, 50)

    @property
    def spread(self) -> float:
        """Highest less lowest, as a share of the median; 0 for a median of 0."""
        return (max(self.rounds) - min(self.rounds)) / self.median if self.median else 0.0


Results = Mapping[str, Mapping[Cell, Goodput]]  # by system


def peak(results: Results, system: str, workload: str) -> float:
    """The highest goodput over the loads of a workload."""
    return max(one.median for cell, one in results[system].items() if cell.workload == workload)


def of_best(results: Results, system: str, value: Mapping[str, float]) -> float:
    """A system's figure over the best of the others. 1 where nobody has anything."""
    best = max(value[other] for other in results if other != system)
    return value[system] / best if best else 1.0


def losing(results: Results, loser: str, winner: str) -> Iterator[tuple[Cell, float]]:
    """Cells in which one has less goodput than the other by more than LOSS, and what it has of it."""
    for cell, other in results[winner].items():
        share = results[loser][cell].median / other.median if other.median else 1.0
        if share < 1.0 - LOSS:
            yield cell, share
