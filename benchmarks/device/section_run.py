"""What the sections of the `gpu` benchmark share: the time they may take, and their figures."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.device.step_bounds import DeviceRates, StepBounds
from benchmarks.figures.report import ResultRow, make_row, make_time_row
from node_engine.model.config.model_config import ModelConfig


class TimeIsUp(Exception):
    """The section has used the seconds that it may take."""


def allot_seconds(weights: Mapping[str, float], total: float) -> dict[str, float]:
    """Share `total` seconds among sections, in proportion to their weights."""
    whole = sum(weights.values())
    return {name: total * weight / whole for name, weight in weights.items()}


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """The model of the engine and of the servers."""

    folder: Path  # config.json and a tokenizer
    config: ModelConfig
    load_format: str  # dummy if the folder has no weights

    @property
    def bounds(self) -> StepBounds:
        return StepBounds(self.config, self.dtype)

    @property
    def dtype(self) -> str:
        """What the engine computes in."""
        return "float32" if self.config.stored_dtype.endswith("float32") else "bfloat16"


@dataclass
class SectionRun:
    """One run of the benchmark. Sections add their figures here."""

    model: MeasuredModel
    device: torch.device
    console: Console  # for tables
    command: str  # reproduces the run
    weights: dict[str, float]  # of the sections that are not begun yet, in their order
    ends_at: float  # on the clock of time.perf_counter()
    rates: DeviceRates | None = None  # measured first on a GPU
    rows: list[ResultRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was left out, and why
    section: str = ""
    deadline: float = 0.0  # of the section

    def begin_section(self, name: str) -> None:
        """Give the section its part of the time that is left."""
        left = max(0.0, self.ends_at - time.perf_counter())
        seconds = allot_seconds(self.weights, left)[name]
        del self.weights[name]
        self.section, self.deadline = name, time.perf_counter() + seconds
        self.report_progress(f"at most {seconds:.0f} s")

    @property
    def seconds_left(self) -> float:
        """Seconds that the section has left."""
        return max(0.0, self.deadline - time.perf_counter())

    def require_time(self) -> None:
        """Raise TimeIsUp if the section has none left. To be called before each measurement."""
        if not self.seconds_left:
            raise TimeIsUp

    @property
    def known_rates(self) -> DeviceRates:
        if self.rates is None:
            raise RuntimeError("the limits of this run are not measured yet")
        return self.rates

    def add_row(
        self, name: str, value: float, unit: str, limit: float | None = None, note: str = ""
    ) -> None:
        """Add a figure of this section; its share is value / limit."""
        row = make_row(f"gpu/{self.section}/{name}", value, unit, self.command, limit, note)
        self._add(row)

    def add_time(self, name: str, seconds: float, least: float, note: str = "") -> None:
        """Add a time in milliseconds beside the least possible one; its share is least / time."""
        name, bound = f"gpu/{self.section}/{name}", least * 1e3
        self._add(make_time_row(name, seconds * 1e3, "ms", self.command, bound, note))

    def find_value(self, name: str) -> float | None:
        """The value of a figure of this run, by its name without the prefix of the benchmark."""
        values = {row.name: row.value for row in self.rows}
        return values.get(f"gpu/{name}")

    def leave_out(self, reason: str) -> None:
        """Note that something is not measured, and why."""
        self.notes.append(f"{self.section}: {reason}")
        self.report_progress(f"LEFT OUT: {reason}")

    def report_progress(self, text: str) -> None:
        left = max(0.0, self.ends_at - time.perf_counter())
        sys.stderr.write(f"gpu: {self.section}: {text} ({left:.0f} s left of the run)\n")
        sys.stderr.flush()

    def list_section_rows(self) -> Sequence[ResultRow]:
        return [row for row in self.rows if row.name.startswith(f"gpu/{self.section}/")]

    def _add(self, row: ResultRow) -> None:
        self.rows.append(row)
        share = "" if row.share is None else f", {row.share:.1%} of the limit"
        self.report_progress(f"{row.name} {row.value:,.4g} {row.unit}{share}")
