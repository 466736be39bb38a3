"""The terminal that tables are printed on."""

import sys

from rich.console import Console

_PIPE_WIDTH = 160  # columns, where there is no terminal to ask


def screen(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal; wide enough for every table where there is none, so that nothing is cut."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else _PIPE_WIDTH)
