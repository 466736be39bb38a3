"""`baton bench`: run benchmarks in a separate process, so that the command line imports little."""

import os
import sys

import typer


def register(app: typer.Typer) -> None:
    app.command(
        "bench",
        context_settings={
            "allow_extra_args": True,
            "ignore_unknown_options": True,
            "help_option_names": [],
        },
    )(bench)


def bench(context: typer.Context) -> None:
    """Measure a running system, or one that is started for it: `baton bench --help` lists what."""
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks", *context.args])
