"""A progress bar on standard error without dependencies; plain lines without a terminal."""

import sys
import time
from types import TracebackType

WIDTH = 30  # characters of the bar
PLAIN_EVERY = 10.0  # seconds between lines without a terminal
REDRAW_EVERY = 0.1  # seconds


class ProgressBar:
    def __init__(self, title: str) -> None:
        self._title = title
        self._is_terminal = sys.stderr.isatty()
        self._drawn_at = float("-inf")

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._is_terminal:
            sys.stderr.write("\n")

    def show_progress(self, share: float, note: str = "") -> None:
        """Show that `share` of the work is done, 0 to 1."""
        now = time.monotonic()
        if (
            now - self._drawn_at < (REDRAW_EVERY if self._is_terminal else PLAIN_EVERY)
            and share < 1.0
        ):
            return
        self._drawn_at = now
        if self._is_terminal:
            bar = ("#" * int(share * WIDTH)).ljust(WIDTH, ".")
            sys.stderr.write(f"\r{self._title} [{bar}] {share:4.0%} {note}\x1b[K")
        else:
            sys.stderr.write(f"{self._title} {share:4.0%} {note}\n")
        sys.stderr.flush()
