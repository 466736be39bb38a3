"""`ratio`: whether the advice on the ratio is good, and whether `auto` keeps an SLO.

Runs on eight paced nodes, with real processes:

sweep   four workloads, every split: what `baton ratio advise` recommends in split 4:4, against
        the best split. A split that serves less than half as much as the best in its first run
        is not measured again.
turn    a load that turns from prompt-heavy to output-heavy, with and without `baton ratio auto`
swing   a load that swings between both every 20 s, with and without it
"""

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.role_split import RoleSplit
from benchmarks.figures.ratio_plots import GoodputCurve, plot_ratio_sweep, plot_timelines
from benchmarks.figures.report import ResultRow, make_row
from benchmarks.scenarios import ratio_workloads as workloads
from benchmarks.scenarios.changing_load import run_swinging_load, run_turning_load
from benchmarks.scenarios.concurrency_sweep import check_plot_path
from benchmarks.scenarios.paced_cluster import PacedCluster, meets_slo, paced_cluster

HELP = "the advised ratio against every other, and the ratio kept by itself"
PARTS = ("sweep", "turn", "swing")
MIN_SHARE_OF_BEST = 0.95  # advised split's goodput / best split's goodput
_SKIP_BELOW_SHARE = 0.5  # share of the best goodput below which a split is not measured again
_INITIAL_SPLIT = RoleSplit(workloads.NODE_COUNT // 2, workloads.NODE_COUNT // 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--part", choices=(*PARTS, "all"), default="all", help="which (default all)"
    )
    _add_sweep_arguments(parser)
    parser.add_argument(
        "--ask-seconds",
        type=float,
        default=60.0,
        help="of load before advice is asked (default 60)",
    )
    _add_changing_load_arguments(parser)
    parser.add_argument(
        "--seed", default="ratio", help="of lengths, arrivals and prompts (default ratio)"
    )


def _add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload",
        choices=(*workloads.RATIO_WORKLOADS, "all"),
        default="all",
        help="of the sweep (default all)",
    )
    parser.add_argument(
        "--splits", default="", metavar="P:D,...", help="of the sweep (default: all of eight nodes)"
    )
    parser.add_argument(
        "--seconds", type=float, default=36.0, help="of a run of the sweep (default 36)"
    )
    parser.add_argument(
        "--runs", type=int, default=3, help="of each split, whose median counts (default 3)"
    )
    parser.add_argument(
        "--plot", type=Path, default=Path("ratio.svg"), help="of the sweep (default ratio.svg)"
    )


def _add_changing_load_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--phase", type=float, default=90.0, help="seconds of each load of `turn` (default 90)"
    )
    parser.add_argument(
        "--swings", type=int, default=9, help="of 20 s and 20 s, of `swing` (default 9)"
    )
    parser.add_argument(
        "--auto-plot",
        type=Path,
        default=Path("ratio-auto.svg"),
        help="of turn and swing (default ratio-auto.svg)",
    )


async def run_parts(options: argparse.Namespace, console: Console, command: str) -> list[ResultRow]:
    for path in (options.plot, options.auto_plot):
        check_plot_path(path)
    parts = PARTS if options.part == "all" else (options.part,)
    rows: list[ResultRow] = []
    async with paced_cluster(console) as cluster:
        if "sweep" in parts:
            rows += await _sweeps(cluster, options, console, command)
        timelines = []
        if "turn" in parts:
            timelines += await run_turning_load(cluster, options.phase, options.seed, console)
        if "swing" in parts:
            timelines += await run_swinging_load(cluster, options.swings, options.seed, console)
    if timelines:
        plot_timelines([timeline for timeline, _ in timelines], options.auto_plot)
        console.print(f"picture: {options.auto_plot}")
        rows += [
            make_row(f"ratio/{name}", value, unit, command)
            for _, figures in timelines
            for name, value, unit in figures
        ]
    return rows


async def _sweeps(
    cluster: PacedCluster, options: argparse.Namespace, console: Console, command: str
) -> list[ResultRow]:
    names = list(workloads.RATIO_WORKLOADS) if options.workload == "all" else [options.workload]
    curves: dict[str, GoodputCurve] = {}
    rows: list[ResultRow] = []
    for name in names:
        curves[name] = await _sweep(cluster, name, options, console)
        rows += to_rows(name, curves[name], command)
    console.print(ratio_table(curves))
    plot_ratio_sweep(
        curves, {name: median_goodput(curve) for name, curve in curves.items()}, options.plot
    )
    console.print(f"picture: {options.plot}")
    return rows


async def _sweep(
    cluster: PacedCluster, name: str, options: argparse.Namespace, console: Console
) -> GoodputCurve:
    load, slo, seconds = workloads.RATIO_WORKLOADS[name], workloads.SLO, options.seconds
    await cluster.set_ratio(_INITIAL_SPLIT)
    await cluster.send_plan(
        load.plan_requests(f"{options.seed}/ask", options.ask_seconds),
        options.ask_seconds - 10.0,
        "ask",
    )
    advice = await cluster.get_advice(slo)
    advised = RoleSplit(advice.prefill, advice.decode)
    console.print(f"{name}: {advised} is advised: {advice.reason}")
    runs: dict[RoleSplit, list[float]] = {
        split: [] for split in {*_parse_splits(options.splits), advised}
    }
    for number in range(options.runs):
        best = max(
            (statistics.median(goodputs) for goodputs in runs.values() if goodputs), default=0.0
        )
        for split in sorted(runs, key=lambda split: split.prefill_nodes):
            if number and statistics.median(runs[split]) < _SKIP_BELOW_SHARE * best:
                continue
            await cluster.set_ratio(split)
            plan = load.plan_requests(f"{options.seed}/{number}", seconds)
            measurements = await cluster.send_plan(plan, seconds, f"{name}/{split}/{number}")
            runs[split].append(
                sum(meets_slo(measurement, slo) for measurement in measurements) / seconds
            )
            console.print(
                f"{name} {split} run {number + 1}: goodput {runs[split][-1]:.2f}/s "
                f"of {load.requests_per_second:g}/s"
            )
    return GoodputCurve(runs, advised)


def _parse_splits(text: str) -> list[RoleSplit]:
    """Return the splits of --splits, by default all. Raises ValueError."""
    if not text:
        return [
            RoleSplit(prefill, workloads.NODE_COUNT - prefill)
            for prefill in range(1, workloads.NODE_COUNT)
        ]
    found = [RoleSplit(*map(int, word.split(":"))) for word in text.split(",")]
    if any(
        split.total_nodes != workloads.NODE_COUNT
        or not split.prefill_nodes
        or not split.decode_nodes
        for split in found
    ):
        raise ValueError(
            f"--splits {text}: each has {workloads.NODE_COUNT} nodes, and one of each role at least"
        )
    return found


def median_goodput(curve: GoodputCurve) -> dict[RoleSplit, float]:
    return {split: statistics.median(runs) for split, runs in curve.runs.items()}


def relative_range(runs: Sequence[float]) -> float:
    """Return the range over the median, between runs of the same split."""
    middle = statistics.median(runs)
    return (max(runs) - min(runs)) / middle if middle else 0.0


def to_rows(name: str, curve: GoodputCurve, command: str) -> list[ResultRow]:
    goodput, best = median_goodput(curve), max(median_goodput(curve).values())
    rows = [
        make_row(f"ratio/{name}/{split}/goodput", value, "requests/s", command)
        for split, value in goodput.items()
    ]
    rows.append(
        make_row(f"ratio/{name}/advised", goodput[curve.advised_split], "requests/s", command, best)
    )
    rows.append(
        make_row(
            f"ratio/{name}/of_best",
            goodput[curve.advised_split] / best if best else 0.0,
            "of the best",
            command,
            MIN_SHARE_OF_BEST,
        )
    )
    leader = max(goodput, key=lambda split: goodput[split])
    rows.append(
        make_row(
            f"ratio/{name}/run_to_run", relative_range(curve.runs[leader]), "of the median", command
        )
    )
    return rows


def ratio_table(curves: dict[str, GoodputCurve]) -> Table:
    table = Table(title="goodput, requests/s", title_justify="left", box=None, header_style="bold")
    table.add_column("workload", no_wrap=True)
    for heading in (
        "advised",
        "its goodput",
        "best",
        "its goodput",
        "advised / best",
        "run to run",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, curve in curves.items():
        goodput = median_goodput(curve)
        best = max(goodput, key=lambda split: goodput[split])
        share = goodput[curve.advised_split] / goodput[best] if goodput[best] else 0.0
        table.add_row(
            name,
            str(curve.advised_split),
            f"{goodput[curve.advised_split]:.2f}",
            str(best),
            f"{goodput[best]:.2f}",
            f"{share:.0%}",
            f"{relative_range(curve.runs[best]):.0%}",
        )
    return table


def main(options: argparse.Namespace, console: Console, command: str) -> list[ResultRow]:
    return asyncio.run(run_parts(options, console, command))
