"""The progress bar of the Python API and of batches, on standard error."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def show_progress(
    total: int, unit: str, *, is_shown: bool = True, done: int = 0
) -> Iterator[Callable[[int], None]]:
    """Yield a thread-safe function that advances the bar by one, with so many output tokens.

    `done` of the `total` were done before. Nothing is shown without a terminal.
    """
    if not (is_shown and sys.stderr.isatty()):
        yield lambda tokens: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn(unit),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[rate]}"),
    )
    num_tokens = 0
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(unit, total=total, completed=done, rate="")

        def advance(tokens: int) -> None:
            nonlocal num_tokens
            num_tokens += tokens
            seconds = progress.tasks[0].elapsed or 0.0
            rate = f"{num_tokens / seconds:.0f} tokens/s" if seconds else ""
            progress.update(task, advance=1, rate=rate)

        yield advance
