"""Pictures of the ratio: goodput over splits, and what a changing load makes of it over time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.ratio import Split


@dataclass(frozen=True, slots=True)
class Curve:
    """Goodput of each split: its runs, in requests a second."""

    runs: Mapping[Split, Sequence[float]]
    advised: Split


@dataclass(frozen=True, slots=True)
class Course:
    """One run: `shares` within the objective for each of the `bin` seconds, and when which ratio was there."""

    title: str
    bin: float
    shares: Sequence[float]
    splits: Sequence[tuple[float, Split]]
    turns: Sequence[float]  # moments when the load changes


def plot_sweep(curves: Mapping[str, Curve], median: Mapping[str, Mapping[Split, float]], path: Path) -> None:
    figure, save = _figure((10, 6))
    for place, (name, curve) in enumerate(curves.items()):
        axes = figure.add_subplot(2, (len(curves) + 1) // 2, place + 1)
        splits = sorted(curve.runs, key=lambda split: split.prefill)
        x = list(range(len(splits)))
        axes.plot(x, [median[name][split] for split in splits], "-", color="tab:blue")
        for at, split in enumerate(splits):
            axes.plot([at] * len(curve.runs[split]), list(curve.runs[split]), ".", color="tab:blue")
        axes.axvline(splits.index(curve.advised), color="tab:orange", linestyle="--", label="advised")
        axes.set_xticks(x, [str(split) for split in splits])
        axes.set(title=name, ylabel="goodput, requests/s", ylim=(0, None))
        axes.legend(loc="lower center")
    save(path)


def plot_courses(courses: Sequence[Course], path: Path) -> None:
    figure, save = _figure((10, 3 * len(courses)))
    for place, course in enumerate(courses):
        left = figure.add_subplot(len(courses), 1, place + 1)
        right = left.twinx()
        x = [(number + 0.5) * course.bin for number in range(len(course.shares))]
        left.plot(x, [100 * share for share in course.shares], "o-", color="tab:blue", label="within the SLO")
        end = len(course.shares) * course.bin
        moments = [at for at, _ in course.splits] + [end]
        prefill = [split.prefill for _, split in course.splits]
        right.step(moments, [*prefill, prefill[-1]], where="post", color="tab:orange", label="prefill nodes")
        for turn in course.turns:
            left.axvline(turn, color="tab:gray", linestyle=":")
        left.set(title=course.title, xlabel="seconds", ylabel="% of requests", ylim=(-3, 103), xlim=(0, end))
        right.set(ylabel="prefill nodes", ylim=(0, 8))
        handles = [*left.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
        left.legend(handles=handles, loc="lower right")
    save(path)


def _figure(size: tuple[float, float]) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.savefig
