"""`baton`: a thin client. It starts processes and calls them; it imports none of them, and no
torch.

Every command lives in its own file and imports what is slow (grpc, uvloop) inside its function, so
that `--help` answers at once.
"""

import os
import sys
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
    status,
    tenants,
    top,
    up,
)
from baton.cli.common import unavailable as unbuilt
from baton.cli.common.errors import exit_code, print_error
from baton.errors import BatonError

app = typer.Typer(
    name="baton",
    help="Serve language models with prefill and decode on separate nodes.",
    epilog="Exit codes: 0 done, 1 the thing asked about is bad, 2 wrong usage, 3 cannot reach the cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
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
    status,
    top,
    ratio,
    explain,
    drain,
    audit,
    doctor,
    bench,
    tenants,
    unbuilt,
):
    command.register(app)


def main() -> None:
    """The entry point. An error of ours is one line on standard error and its exit code, never a
    traceback."""
    try:
        app()
    except BatonError as error:
        # Settings that cannot be resolved name no format: then the variable does.
        print_error(
            error, as_json=sys.argv[1:2] == ["up"] and os.environ.get("BATON_LOG_FORMAT") == "json"
        )
        sys.exit(exit_code(error))


if __name__ == "__main__":
    main()
