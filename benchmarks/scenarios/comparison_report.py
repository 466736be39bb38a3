"""The results of `compare`: tables, sentences and rows of figures."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from baton.slo import Slo
from benchmarks.figures.report import ResultRow, make_row
from benchmarks.scenarios import comparison
from benchmarks.scenarios.comparison import (
    COLOCATED,
    DISAGGREGATED,
    ComparisonCell,
    ComparisonWorkload,
    GoodputBySystem,
    IdleLatency,
)


def idle_table(
    latencies: Mapping[str, Mapping[int, IdleLatency]], bounds: Mapping[int, Slo]
) -> Table:
    """Return the idle latencies by system and prompt length, with the bounds of a good request."""
    table = Table(
        title="idle: TTFT and TPOT, milliseconds",
        title_justify="left",
        box=None,
        header_style="bold",
    )
    table.add_column("prompt", justify="right")
    for name in latencies:
        table.add_column(name, justify="right")
    table.add_column("good is within", justify="right")
    for length, bound in bounds.items():
        figures = [
            f"{by_length[length].ttft * 1e3:.1f}, {by_length[length].tpot * 1e3:.2f}"
            for by_length in latencies.values()
        ]
        limits = f"{(bound.ttft_seconds or 0) * 1e3:.1f}, {(bound.tpot_seconds or 0) * 1e3:.2f}"
        table.add_row(str(length), *figures, limits)
    return table


def goodput_table(results: GoodputBySystem) -> Table:
    """Return the goodput of every cell and system."""
    table = Table(
        title="goodput, requests/s: median (difference between rounds)",
        title_justify="left",
        box=None,
        header_style="bold",
    )
    table.add_column("workload/load")
    for name in results:
        table.add_column(name, justify="right")
    for cell in next(iter(results.values())):
        figures = [
            f"{results[name][cell].median:.2f} ({results[name][cell].spread:.0%})"
            for name in results
        ]
        table.add_row(str(cell), *figures)
    return table


def describe_results(
    results: GoodputBySystem, workloads: Sequence[ComparisonWorkload], system: str
) -> list[str]:
    """Compare the peak goodput of `system` with the best other one, workload by workload.

    The last line names the loads at which disaggregation loses to colocation.
    """
    lines = []
    for workload in workloads:
        peaks = {name: comparison.peak_goodput(results, name, workload.name) for name in results}
        best = max((name for name in results if name != system), key=lambda name: peaks[name])
        share = comparison.share_of_best_other(results, system, peaks)
        lines.append(
            f"{workload.name}: {system} has {share:.2f} of the peak goodput of {best} "
            f"({peaks[system]:.2f} of {peaks[best]:.2f} requests/s)"
        )
    if {DISAGGREGATED, COLOCATED} <= results.keys():
        lost = [
            f"{cell} ({share:.0%} of {COLOCATED})"
            for cell, share in comparison.losing_cells(results, DISAGGREGATED, COLOCATED)
        ]
        lines.append(f"disaggregation loses at: {', '.join(lost) or 'none system these loads'}")
    return lines


def to_rows(
    results: GoodputBySystem,
    local: dict[ComparisonCell, float],
    bounds: dict[int, Slo],
    workloads: Sequence[ComparisonWorkload],
    system: str,
    command: str,
) -> list[ResultRow]:
    """Return the SLOs, each cell's goodput and spread, and the share of the best other system."""
    rows = _slo_rows(bounds, command) + _goodput_rows(results, command)
    for cell in next(iter(results.values())):
        goodputs = {name: results[name][cell].median for name in results}
        share = comparison.share_of_best_other(results, system, goodputs)
        rows.append(make_row(f"compare/{cell}/{system}_of_best", share, "x", command))
        if cell in local:
            name = f"compare/{cell}/{system}_local"
            rows.append(make_row(name, local[cell], "of prompts", command))
    for workload in workloads:
        peaks = {name: comparison.peak_goodput(results, name, workload.name) for name in results}
        share = comparison.share_of_best_other(results, system, peaks)
        rows.append(make_row(f"compare/{workload.name}/{system}_of_best", share, "x", command))
    return rows


def _slo_rows(bounds: Mapping[int, Slo], command: str) -> list[ResultRow]:
    rows = []
    for length, bound in bounds.items():
        for metric, seconds in (("ttft", bound.ttft_seconds), ("tpot", bound.tpot_seconds)):
            name = f"compare/slo/{length}/{metric}"
            rows.append(make_row(name, (seconds or 0.0) * 1e3, "ms", command))
    return rows


def _goodput_rows(results: GoodputBySystem, command: str) -> list[ResultRow]:
    rows = []
    for name, cells in results.items():
        for cell, goodput in cells.items():
            prefix = f"compare/{cell}/{name}"
            rows.append(make_row(f"{prefix}/goodput", goodput.median, "requests/s", command))
            rows.append(make_row(f"{prefix}/spread", goodput.spread, "of the median", command))
    return rows
