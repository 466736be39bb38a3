"""`baton run-batch`: answer a file of requests, in a separate process that loads the engine."""

import os
import sys

import typer


def register(app: typer.Typer) -> None:
    app.command(
        "run-batch",
        context_settings={
            "allow_extra_args": True,
            "ignore_unknown_options": True,
            "help_option_names": [],
        },
    )(run_batch)


def run_batch(context: typer.Context) -> None:
    """Answer a file of requests in OpenAI's batch format: `baton run-batch --help` lists how."""
    os.execv(sys.executable, [sys.executable, "-m", "offline.batch", *context.args])
