"""The terminal on which tables are printed."""

import sys

from rich.console import Console

_WIDTH_WITHOUT_TERMINAL = 160  # columns


def make_console(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal.

    Without a terminal it is wide enough for every table, so that nothing is cut.
    """
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else _WIDTH_WITHOUT_TERMINAL)
