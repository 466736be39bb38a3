"""Tables and headings of the page."""

from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table, with an empty one behind it. A cell's own bars are kept from ending it."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in cells), ""]


def code(text: str) -> str:
    return f"`{text}`"


def link(kind: str, name: str) -> str:
    """To the heading of an object or a message, which begins with its kind: both sides have a
    `Message`."""
    return f"[{name}](#{kind}-{name.lower()})"


def heading(level: int, text: str) -> list[str]:
    return ["#" * level + " " + text, ""]
