"""Plots about the ratio: goodput over splits, and SLO attainment under a changing load."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.role_split import RoleSplit


@dataclass(frozen=True, slots=True)
class GoodputCurve:
    """Goodput of each split: its runs, in requests a second."""

    runs: Mapping[RoleSplit, Sequence[float]]
    advised_split: RoleSplit


@dataclass(frozen=True, slots=True)
class LoadTimeline:
    """One run: `slo_shares` within the objective for each of the `bin_seconds` seconds, and when
    which ratio was there."""

    title: str
    bin_seconds: float
    slo_shares: Sequence[float]
    splits: Sequence[tuple[float, RoleSplit]]
    load_changes: Sequence[float]  # moments when the load changes


def plot_ratio_sweep(
    curves: Mapping[str, GoodputCurve], median: Mapping[str, Mapping[RoleSplit, float]], path: Path
) -> None:
    figure, save = _new_figure((10, 6))
    for place, (name, curve) in enumerate(curves.items()):
        axes = figure.add_subplot(2, (len(curves) + 1) // 2, place + 1)
        splits = sorted(curve.runs, key=lambda split: split.prefill_nodes)
        x = list(range(len(splits)))
        axes.plot(x, [median[name][split] for split in splits], "-", color="tab:blue")
        for at, split in enumerate(splits):
            axes.plot([at] * len(curve.runs[split]), list(curve.runs[split]), ".", color="tab:blue")
        axes.axvline(
            splits.index(curve.advised_split), color="tab:orange", linestyle="--", label="advised"
        )
        axes.set_xticks(x, [str(split) for split in splits])
        axes.set(title=name, ylabel="goodput, requests/s", ylim=(0, None))
        axes.legend(loc="lower center")
    save(path)


def plot_timelines(courses: Sequence[LoadTimeline], path: Path) -> None:
    figure, save = _new_figure((10, 3 * len(courses)))
    for place, course in enumerate(courses):
        share_axis = figure.add_subplot(len(courses), 1, place + 1)
        right = share_axis.twinx()
        x = [(number + 0.5) * course.bin_seconds for number in range(len(course.slo_shares))]
        share_axis.plot(
            x,
            [100 * share for share in course.slo_shares],
            "o-",
            color="tab:blue",
            label="within the SLO",
        )
        end = len(course.slo_shares) * course.bin_seconds
        moments = [at for at, _ in course.splits] + [end]
        prefill = [split.prefill_nodes for _, split in course.splits]
        right.step(
            moments,
            [*prefill, prefill[-1]],
            where="post",
            color="tab:orange",
            label="prefill nodes",
        )
        for turn in course.load_changes:
            share_axis.axvline(turn, color="tab:gray", linestyle=":")
        share_axis.set(
            title=course.title,
            xlabel="seconds",
            ylabel="% of requests",
            ylim=(-3, 103),
            xlim=(0, end),
        )
        right.set(ylabel="prefill nodes", ylim=(0, 8))
        handles = [
            *share_axis.get_legend_handles_labels()[0],
            *right.get_legend_handles_labels()[0],
        ]
        share_axis.legend(handles=handles, loc="lower right")
    save(path)


def _new_figure(size: tuple[float, float]) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.savefig
