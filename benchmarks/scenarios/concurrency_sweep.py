"""A sweep over concurrency: throughput, TTFT, and the ceiling for a TTFT bound."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load.measurement import CellResult

PLOT_FORMATS = (".svg", ".png")


@dataclass(frozen=True, slots=True)
class SweepPoint:
    concurrency: int
    result: CellResult

    def meets_ttft(self, bound: float) -> bool:
        """Return whether no request failed and the p90 of TTFT is within `bound` seconds."""
        result = self.result
        return not result.error_counts and result.ttft is not None and result.ttft.p90 <= bound


def find_ceiling(points: Sequence[SweepPoint], bound: float) -> SweepPoint | None:
    """Return the point with the highest throughput that meets `bound`, or None."""
    return max(
        (point for point in points if point.meets_ttft(bound)),
        key=lambda point: point.result.tokens_per_second,
        default=None,
    )


def describe_ceiling(points: Sequence[SweepPoint], bound: float) -> str:
    best = find_ceiling(points, bound)
    if best is None:
        return f"no point of the sweep keeps the p90 of TTFT within {bound * 1e3:g} ms"
    result = best.result
    assert result.ttft is not None
    return (
        f"ceiling with p90 TTFT within {bound * 1e3:g} ms: "
        f"{result.tokens_per_second:.1f} tokens/s, "
        f"{result.requests_per_second:.2f} requests/s at concurrency {best.concurrency} "
        f"(p90 {result.ttft.p90 * 1e3:.1f} ms)"
    )


def check_plot_path(path: Path) -> None:
    """Check the plot's format before anything is measured.

    Raises ValueError for an unknown format, or if matplotlib is missing.
    """
    if path.suffix not in PLOT_FORMATS:
        raise ValueError(
            f"--plot {path}: a picture is a file that ends in {' or '.join(PLOT_FORMATS)}"
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'baton-serve[bench]'") from None


def plot_sweep(points: Sequence[SweepPoint], bound: float | None, path: Path, title: str) -> None:
    """Plot throughput (left axis) and the p50 and p90 of TTFT (right axis) over concurrency.

    `bound` is in seconds.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    plotted = [point for point in points if point.result.ttft is not None]
    x = [point.concurrency for point in plotted]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    ttft_axis = figure.add_subplot()
    right = ttft_axis.twinx()
    ttft_axis.plot(
        x,
        [point.result.tokens_per_second for point in plotted],
        "o-",
        color="tab:blue",
        label="output tokens/s",
    )
    for quantile, style in (("p50", "s--"), ("p90", "^-")):
        values = [getattr(point.result.ttft, quantile) * 1e3 for point in plotted]
        right.plot(x, values, style, color="tab:red", label=f"TTFT {quantile}")
    if bound is not None:
        right.axhline(bound * 1e3, color="tab:red", linestyle=":", label="TTFT bound")
        best = find_ceiling(points, bound)
        if best is not None:
            ttft_axis.axvline(best.concurrency, color="tab:gray", linestyle=":", label="ceiling")
    ttft_axis.set_xscale("log", base=2)
    ttft_axis.set_xticks(x, [str(point) for point in x])
    ttft_axis.set(
        xlabel="concurrent requests", ylabel="output tokens/s", title=title, ylim=(0, None)
    )
    right.set(ylabel="TTFT, ms", ylim=(0, None))
    handles = [*ttft_axis.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    ttft_axis.legend(handles=handles, loc="upper left")
    figure.savefig(path)
