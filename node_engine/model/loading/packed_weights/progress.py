"""Shows how far the packing or the reading of weights is, if stderr is a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def show_progress(description: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yield a thread-safe function that advances the bar by a number of bytes."""
    if not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(description), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=total_bytes)
        yield lambda num_bytes: progress.advance(task, num_bytes)
