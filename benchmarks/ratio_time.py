"""Loads that change while they are served, with `baton ratio auto` and without."""

import asyncio
import time
from collections.abc import Sequence

from rich.console import Console

from baton.ratio import Split
from benchmarks import ratio_workloads as workloads
from benchmarks.measurement import Measurement
from benchmarks.ratio_cluster import PacedCluster, good, share
from benchmarks.ratio_plots import Course
from benchmarks.ratio_workloads import SLO, SWINGING, WORKLOADS, Offered

SWING = 20.0  # seconds of each load
_BIN = 10.0  # seconds
_LAST = 40.0  # seconds at the end of a turned load in which its objective is to be kept again

Told = list[tuple[str, float, str]]  # name, value, unit


async def run_turn(cluster: PacedCluster, phase: float, seed: str, console: Console) -> list[tuple[Course, Told]]:
    loads = [(WORKLOADS["prompt-heavy"], phase), (WORKLOADS["output-heavy"], phase)]
    found = []
    for automatic in (True, False):
        course, seen, moves = await _course(cluster, "turn", loads, Split(7, 1), automatic, seed)
        name = f"turn/{'auto' if automatic else 'still'}"
        windows = {"before": (0.0, phase), "after": (phase, 2 * phase), "at_last": (2 * phase - _LAST, 2 * phase)}
        told: Told = [(f"{name}/{key}", _share(seen, *window), "within SLO") for key, window in windows.items()]
        told.append((f"{name}/moves", float(moves), "changes"))
        if automatic:
            told.append((f"{name}/restored_after", _restored(course, phase), "s"))
        found.append((course, told))
        _tell(console, told)
    return found


async def run_swing(cluster: PacedCluster, swings: int, seed: str, console: Console) -> list[tuple[Course, Told]]:
    loads = [(load, SWING) for _ in range(swings) for load in SWINGING]
    found = []
    for automatic in (True, False):
        course, seen, moves = await _course(cluster, "swing", loads, Split(4, 4), automatic, seed)
        name = f"swing/{'auto' if automatic else 'still'}"
        told: Told = [
            (f"{name}/all", share([one for _, one in seen], SLO), "within SLO"),
            (f"{name}/second_half", _share(seen, swings * SWING, 2 * swings * SWING), "within SLO"),
            (f"{name}/moves", float(moves), "changes"),
        ]
        found.append((course, told))
        _tell(console, told)
    return found


async def _course(
    cluster: PacedCluster,
    name: str,
    loads: Sequence[tuple[Offered, float]],
    begin: Split,
    automatic: bool,
    seed: str,
) -> tuple[Course, list[tuple[float, Measurement]], int]:
    await cluster.manual()
    await cluster.set(begin)
    before = await cluster.moves()
    if automatic:
        await cluster.auto(SLO)
    cluster.seen.clear()
    watching = asyncio.create_task(cluster.watch())
    plan, seconds = workloads.phases(loads, f"{seed}/{name}"), sum(each for _, each in loads)
    began = time.perf_counter()
    try:
        seen = await cluster.offer(plan, seconds, f"{name}/{automatic}")
    finally:
        watching.cancel()
        await cluster.manual()
    timed = [(one.due - began, one) for one in seen]
    shares = [_share(timed, at * _BIN, (at + 1) * _BIN) for at in range(int(seconds / _BIN))]
    turns = [sum(each for _, each in loads[: number + 1]) for number in range(len(loads) - 1)]
    splits = [(max(0.0, at - began), split) for at, split in cluster.seen]
    title = f"{name}, {'auto' if automatic else f'{begin} throughout'}"
    return Course(title, _BIN, shares, splits, turns), timed, await cluster.moves() - before


def _share(seen: Sequence[tuple[float, Measurement]], begin: float, end: float) -> float:
    asked = [one for at, one in seen if begin <= at < end]
    return sum(good(one, SLO) for one in asked) / len(asked) if asked else 0.0


def _restored(course: Course, turn: float) -> float:
    """Seconds from the turn until 90% are within the objective and stay so to the end; infinite if they do not."""
    last_bad = max((at for at, kept in enumerate(course.shares) if kept < 0.9), default=-1)
    return (last_bad + 1) * course.bin - turn if last_bad + 1 < len(course.shares) else float("inf")


def _tell(console: Console, told: Told) -> None:
    console.print(", ".join(f"{name} {value:.3g} {unit}" for name, value, unit in told))
