"""Rows of figures: one shape for every benchmark, on a terminal and in a JSON file."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `limit` is what it is held against, in the same unit, and `share` their ratio: a target (below 1 is
    met) or what the hardware allows. `command` reproduces it."""

    name: str
    value: float
    unit: str
    limit: float | None
    share: float | None
    command: str


def row(name: str, value: float, unit: str, command: str, limit: float | None = None) -> Row:
    share = value / limit if limit else None
    return Row(name, value, unit, limit, share, command)


def write_json(path: Path, rows: Sequence[Row]) -> None:
    path.write_text(json.dumps([asdict(one) for one in rows], indent=1) + "\n")


def print_rows(console: Console, title: str, rows: Sequence[Row]) -> None:
    table = Table("figure", title=title, title_justify="left", box=None, header_style="bold")
    for heading in ("value", "unit", "limit", "share"):
        table.add_column(heading, justify="left" if heading == "unit" else "right")
    for one in rows:
        limit = "" if one.limit is None else f"{one.limit:,.4g}"
        share = "" if one.share is None else f"{one.share:.0%}"
        table.add_row(one.name, f"{one.value:,.4g}", one.unit, limit, share)
    console.print(table)
