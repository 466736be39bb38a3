"""Loads that change while they are served, with and without `baton ratio auto`."""

import asyncio
import time
from collections.abc import Sequence

from rich.console import Console

from baton.role_split import RoleSplit
from benchmarks.figures.ratio_plots import LoadTimeline
from benchmarks.load.measurement import RequestMeasurement
from benchmarks.scenarios import ratio_workloads as workloads
from benchmarks.scenarios.paced_cluster import PacedCluster, meets_slo, slo_share
from benchmarks.scenarios.ratio_workloads import RATIO_WORKLOADS, SLO, SWINGING_LOADS, OfferedLoad

SWING_SECONDS = 20.0  # seconds of each load
_BIN = 10.0  # seconds
_FINAL_WINDOW = 40.0  # at the end of a turned load, in which the SLO should be met again

NamedFigures = list[tuple[str, float, str]]  # name, value, unit


async def run_turning_load(
    cluster: PacedCluster, phase: float, seed: str, console: Console
) -> list[tuple[LoadTimeline, NamedFigures]]:
    loads = [(RATIO_WORKLOADS["prompt-heavy"], phase), (RATIO_WORKLOADS["output-heavy"], phase)]
    found = []
    for automatic in (True, False):
        course, seen, moves = await _run_timeline(
            cluster, "turn", loads, RoleSplit(7, 1), automatic, seed
        )
        name = f"turn/{'auto' if automatic else 'still'}"
        windows = {
            "before": (0.0, phase),
            "after": (phase, 2 * phase),
            "at_last": (2 * phase - _FINAL_WINDOW, 2 * phase),
        }
        told: NamedFigures = [
            (f"{name}/{key}", _slo_share_between(seen, *window), "within SLO")
            for key, window in windows.items()
        ]
        told.append((f"{name}/moves", float(moves), "changes"))
        if automatic:
            told.append((f"{name}/restored_after", _recovery_seconds(course, phase), "s"))
        found.append((course, told))
        _print_figures(console, told)
    return found


async def run_swinging_load(
    cluster: PacedCluster, swings: int, seed: str, console: Console
) -> list[tuple[LoadTimeline, NamedFigures]]:
    loads = [(load, SWING_SECONDS) for _ in range(swings) for load in SWINGING_LOADS]
    found = []
    for automatic in (True, False):
        course, seen, moves = await _run_timeline(
            cluster, "swing", loads, RoleSplit(4, 4), automatic, seed
        )
        name = f"swing/{'auto' if automatic else 'still'}"
        told: NamedFigures = [
            (f"{name}/all", slo_share([one for _, one in seen], SLO), "within SLO"),
            (
                f"{name}/second_half",
                _slo_share_between(seen, swings * SWING_SECONDS, 2 * swings * SWING_SECONDS),
                "within SLO",
            ),
            (f"{name}/moves", float(moves), "changes"),
        ]
        found.append((course, told))
        _print_figures(console, told)
    return found


async def _run_timeline(
    cluster: PacedCluster,
    name: str,
    loads: Sequence[tuple[OfferedLoad, float]],
    begin: RoleSplit,
    automatic: bool,
    seed: str,
) -> tuple[LoadTimeline, list[tuple[float, RequestMeasurement]], int]:
    await cluster.disable_auto_ratio()
    await cluster.set_ratio(begin)
    before = await cluster.count_ratio_changes()
    if automatic:
        await cluster.enable_auto_ratio(SLO)
    cluster.ratio_history.clear()
    watching = asyncio.create_task(cluster.record_ratio_changes())
    plan, seconds = workloads.plan_phases(loads, f"{seed}/{name}"), sum(each for _, each in loads)
    began = time.perf_counter()
    try:
        seen = await cluster.send_plan(plan, seconds, f"{name}/{automatic}")
    finally:
        watching.cancel()
        await cluster.disable_auto_ratio()
    timed = [(one.due_at - began, one) for one in seen]
    shares = [
        _slo_share_between(timed, at * _BIN, (at + 1) * _BIN) for at in range(int(seconds / _BIN))
    ]
    turns = [sum(each for _, each in loads[: number + 1]) for number in range(len(loads) - 1)]
    splits = [(max(0.0, at - began), split) for at, split in cluster.ratio_history]
    title = f"{name}, {'auto' if automatic else f'{begin} throughout'}"
    return (
        LoadTimeline(title, _BIN, shares, splits, turns),
        timed,
        await cluster.count_ratio_changes() - before,
    )


def _slo_share_between(
    seen: Sequence[tuple[float, RequestMeasurement]], begin: float, end: float
) -> float:
    asked = [one for at, one in seen if begin <= at < end]
    return sum(meets_slo(one, SLO) for one in asked) / len(asked) if asked else 0.0


def _recovery_seconds(course: LoadTimeline, turn: float) -> float:
    """Return the seconds from the turn until 90% meet the SLO for good, or infinity."""
    last_bad = max((at for at, kept in enumerate(course.slo_shares) if kept < 0.9), default=-1)
    return (
        (last_bad + 1) * course.bin_seconds - turn
        if last_bad + 1 < len(course.slo_shares)
        else float("inf")
    )


def _print_figures(console: Console, told: NamedFigures) -> None:
    console.print(", ".join(f"{name} {value:.3g} {unit}" for name, value, unit in told))
