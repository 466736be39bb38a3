"""The terminal that tables are printed on."""

import sys

from rich.console import Console

_WIDTH_WITHOUT_TERMINAL = 160  # columns, where there is no terminal to ask


def make_console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal; wide enough for every table where there is none, so that
    nothing is cut."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else _WIDTH_WITHOUT_TERMINAL)
