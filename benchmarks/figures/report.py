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
    """One figure. `limit` is what it is held against, in the same unit, and `share` their ratio: a
    target (below 1 is met) or what the hardware allows. `command` reproduces it."""

    name: str
    value: float
    unit: str
    limit: float | None
    share: float | None
    command: str


def make_row(
    name: str, value: float, unit: str, command: str, limit: float | None = None
) -> ResultRow:
    share = value / limit if limit else None
    return ResultRow(name, value, unit, limit, share, command)


def reproducing_command(arguments: Sequence[str]) -> str:
    """Return the command line of a run, without the API key that it may contain."""
    shown = list(arguments)
    for place, word in enumerate(arguments):
        if word == _SECRET_OPTION and place + 1 < len(shown):
            shown[place + 1] = "KEY"
        elif word.startswith(f"{_SECRET_OPTION}="):
            shown[place] = f"{_SECRET_OPTION}=KEY"
    return "python -m benchmarks " + shlex.join(shown)


def write_json(path: Path, rows: Sequence[ResultRow]) -> None:
    path.write_text(json.dumps([asdict(one) for one in rows], indent=1) + "\n")


def print_rows(console: Console, title: str, rows: Sequence[ResultRow]) -> None:
    table = Table("figure", title=title, title_justify="left", box=None, header_style="bold")
    for heading in ("value", "unit", "limit", "share"):
        table.add_column(heading, justify="left" if heading == "unit" else "right")
    for one in rows:
        limit = "" if one.limit is None else f"{one.limit:,.4g}"
        share = "" if one.share is None else f"{one.share:.0%}"
        table.add_row(one.name, f"{one.value:,.4g}", one.unit, limit, share)
    console.print(table)
