"""Rows of figures, the same for every benchmark, on a terminal and in a JSON file."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

_SECRET_OPTION = "--api-key"


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One figure."""

    name: str
    value: float
    unit: str
    limit: float | None  # a target, or what the hardware allows; in the same unit
    # value / limit: below 1 meets an upper target. Of a time whose limit is the least possible
    # one: limit / value.
    share: float | None
    command: str  # reproduces the figure
    note: str = ""  # what else belongs to the figure, such as the device


class HardwareMissing(Exception):
    """This machine cannot run the benchmark."""


class BenchmarkIncomplete(Exception):
    """A part of the benchmark failed; `rows` are the figures of the others."""

    def __init__(self, message: str, rows: Sequence[ResultRow]) -> None:
        super().__init__(message)
        self.rows = rows


def make_row(
    name: str, value: float, unit: str, command: str, limit: float | None = None, note: str = ""
) -> ResultRow:
    share = value / limit if limit else None
    return ResultRow(name, value, unit, limit, share, command, note)


def make_time_row(
    name: str, value: float, unit: str, command: str, least: float, note: str = ""
) -> ResultRow:
    """A time beside the least time that the hardware allows; its share is least / value."""
    return ResultRow(name, value, unit, least, least / value, command, note)


def reproducing_command(arguments: Sequence[str]) -> str:
    """Return the command line of a run, without the API key that it may contain."""
    words = list(arguments)
    for index, word in enumerate(arguments):
        if word == _SECRET_OPTION and index + 1 < len(words):
            words[index + 1] = "KEY"
        elif word.startswith(f"{_SECRET_OPTION}="):
            words[index] = f"{_SECRET_OPTION}=KEY"
    return "python -m benchmarks " + shlex.join(words)


def write_json(path: Path, rows: Sequence[ResultRow]) -> None:
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def print_rows(console: Console, title: str, rows: Sequence[ResultRow]) -> None:
    table = Table("figure", title=title, title_justify="left", box=None, header_style="bold")
    for heading in ("value", "unit", "limit", "share"):
        table.add_column(heading, justify="left" if heading == "unit" else "right")
    has_notes = any(row.note for row in rows)
    if has_notes:
        table.add_column("note")
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit:,.4g}"
        share = "" if row.share is None else f"{row.share:.0%}"
        note = [row.note] if has_notes else []
        table.add_row(row.name, f"{row.value:,.4g}", row.unit, limit, share, *note)
    console.print(table)
