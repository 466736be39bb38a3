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
    share: float | None  # value / limit; below 1 meets an upper target
    command: str  # reproduces the figure


def make_row(
    name: str, value: float, unit: str, command: str, limit: float | None = None
) -> ResultRow:
    share = value / limit if limit else None
    return ResultRow(name, value, unit, limit, share, command)


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
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit:,.4g}"
        share = "" if row.share is None else f"{row.share:.0%}"
        table.add_row(row.name, f"{row.value:,.4g}", row.unit, limit, share)
    console.print(table)
