"""`baton`: a thin client that starts processes and calls them, and imports none of them.

Each command has its own file and imports slow modules (grpc, uvloop) inside its function, so that
`--help` answers at once. The client never imports torch.
"""

import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer

from baton.cli import (
    audit,
    bench,
    chat,
    doctor,
    down,
    drain,
    explain,
    generate,
    ratio,
    run_batch,
    status,
    tenants,
    top,
    up,
)
from baton.cli.common import unavailable
from baton.cli.common.errors import EXIT_FAILURE, CommandFailed, exit_code, print_error
from baton.errors import BatonError, ConfigError

app = typer.Typer(
    name="baton",
    help="Serve language models with prefill and decode on separate nodes.",
    epilog="Exit codes: 0 done, 1 the thing asked about is bad, 2 wrong usage, "
    "3 cannot reach the cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"baton {metadata.version('baton-serve')}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and exit"
        ),
    ] = False,
) -> None:
    """Serve language models with prefill and decode on separate nodes."""


for command in (
    up,
    down,
    generate,
    chat,
    run_batch,
    status,
    top,
    ratio,
    explain,
    drain,
    audit,
    doctor,
    bench,
    tenants,
    unavailable,
):
    command.register(app)


def main() -> None:
    """Run the command line. An error becomes one line on standard error and its exit code."""
    try:
        _check_arguments(sys.argv)
        try:
            app()
        finally:
            if sys.stdout is not None:  # None if the caller has closed it
                sys.stdout.flush()
    except BatonError as error:
        # If the settings cannot be resolved, only the variable tells the log format.
        print_error(
            error, as_json=sys.argv[1:2] == ["up"] and os.environ.get("BATON_LOG_FORMAT") == "json"
        )
        sys.exit(exit_code(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print_error(CommandFailed(f"{where}{error.strerror or error}"), as_json=False)
        if sys.stdout is not None:
            # What a full disk did not take would fail again when Python flushes it at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILURE)


def _check_arguments(arguments: Sequence[str]) -> None:
    """Raise ConfigError for an argument that is not valid UTF-8, which requests cannot have."""
    for number, argument in enumerate(arguments):
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"argument {number} is not valid UTF-8: {argument!r}") from None


if __name__ == "__main__":
    main()
