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
    results = []
    for automatic in (True, False):
        timeline, measurements, changes = await _run_timeline(
            cluster, "turn", loads, RoleSplit(7, 1), automatic, seed
        )
        name = f"turn/{'auto' if automatic else 'still'}"
        windows = {
            "before": (0.0, phase),
            "after": (phase, 2 * phase),
            "at_last": (2 * phase - _FINAL_WINDOW, 2 * phase),
        }
        figures: NamedFigures = [
            (f"{name}/{key}", _slo_share_between(measurements, *window), "within SLO")
            for key, window in windows.items()
        ]
        figures.append((f"{name}/moves", float(changes), "changes"))
        if automatic:
            figures.append((f"{name}/restored_after", _recovery_seconds(timeline, phase), "s"))
        results.append((timeline, figures))
        _print_figures(console, figures)
    return results


async def run_swinging_load(
    cluster: PacedCluster, swings: int, seed: str, console: Console
) -> list[tuple[LoadTimeline, NamedFigures]]:
    loads = [(load, SWING_SECONDS) for _ in range(swings) for load in SWINGING_LOADS]
    results = []
    for automatic in (True, False):
        timeline, measurements, changes = await _run_timeline(
            cluster, "swing", loads, RoleSplit(4, 4), automatic, seed
        )
        name = f"swing/{'auto' if automatic else 'still'}"
        figures: NamedFigures = [
            (
                f"{name}/all",
                slo_share([measurement for _, measurement in measurements], SLO),
                "within SLO",
            ),
            (
                f"{name}/second_half",
                _slo_share_between(
                    measurements, swings * SWING_SECONDS, 2 * swings * SWING_SECONDS
                ),
                "within SLO",
            ),
            (f"{name}/moves", float(changes), "changes"),
        ]
        results.append((timeline, figures))
        _print_figures(console, figures)
    return results


async def _run_timeline(
    cluster: PacedCluster,
    name: str,
    loads: Sequence[tuple[OfferedLoad, float]],
    initial_split: RoleSplit,
    automatic: bool,
    seed: str,
) -> tuple[LoadTimeline, list[tuple[float, RequestMeasurement]], int]:
    await cluster.disable_auto_ratio()
    await cluster.set_ratio(initial_split)
    before = await cluster.count_ratio_changes()
    if automatic:
        await cluster.enable_auto_ratio(SLO)
    cluster.ratio_history.clear()
    watching = asyncio.create_task(cluster.record_ratio_changes())
    plan = workloads.plan_phases(loads, f"{seed}/{name}")
    seconds = sum(load_seconds for _, load_seconds in loads)
    began = time.perf_counter()
    try:
        measurements = await cluster.send_plan(plan, seconds, f"{name}/{automatic}")
    finally:
        watching.cancel()
        await cluster.disable_auto_ratio()
    timed = [(measurement.due_at - began, measurement) for measurement in measurements]
    shares = [
        _slo_share_between(timed, moment * _BIN, (moment + 1) * _BIN)
        for moment in range(int(seconds / _BIN))
    ]
    turns = [
        sum(load_seconds for _, load_seconds in loads[: number + 1])
        for number in range(len(loads) - 1)
    ]
    splits = [(max(0.0, moment - began), split) for moment, split in cluster.ratio_history]
    title = f"{name}, {'auto' if automatic else f'{initial_split} throughout'}"
    return (
        LoadTimeline(title, _BIN, shares, splits, turns),
        timed,
        await cluster.count_ratio_changes() - before,
    )


def _slo_share_between(
    measurements: Sequence[tuple[float, RequestMeasurement]], begin: float, end: float
) -> float:
    due = [measurement for moment, measurement in measurements if begin <= moment < end]
    return sum(meets_slo(measurement, SLO) for measurement in due) / len(due) if due else 0.0


def _recovery_seconds(timeline: LoadTimeline, turn: float) -> float:
    """Return the seconds from the turn until 90% meet the SLO for good, or infinity."""
    last_bad = max(
        (index for index, share in enumerate(timeline.slo_shares) if share < 0.9), default=-1
    )
    return (
        (last_bad + 1) * timeline.bin_seconds - turn
        if last_bad + 1 < len(timeline.slo_shares)
        else float("inf")
    )


def _print_figures(console: Console, figures: NamedFigures) -> None:
    console.print(", ".join(f"{name} {value:.3g} {unit}" for name, value, unit in figures))
