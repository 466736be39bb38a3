"""Markdown tables and headings."""

from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table and an empty line. Bars within cells are escaped."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in cells), ""]


def code(text: str) -> str:
    return f"`{text}`"


def link(kind: str, name: str) -> str:
    """Return a link to the heading of an object or a message.

    The anchor begins with the kind, because both sides define a `Message`.
    """
    return f"[{name}](#{kind}-{name.lower()})"


def heading(level: int, text: str) -> list[str]:
    return ["#" * level + " " + text, ""]
