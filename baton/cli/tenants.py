"""`baton tenants hash-key`: hash a key for the file of tenants."""

import hashlib
import secrets
import sys
from typing import Annotated

import typer

from baton.errors import ConfigError

_MIN_KEY_CHARACTERS = 16  # the hash of a shorter key could be reversed by guessing


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        no_args_is_help=True, help="Keys for the file of tenants (docs/tenants.md)."
    )
    group.command("hash-key")(hash_key)
    app.add_typer(group, name="tenants")


def hash_key(
    new: Annotated[
        bool, typer.Option("--new", help="Make a random key and print it before its hash")
    ] = False,
) -> None:
    """Read a key from standard input and print its hash for the file of tenants."""
    key = secrets.token_urlsafe(32) if new else sys.stdin.readline().strip()
    if len(key) < _MIN_KEY_CHARACTERS:
        raise ConfigError(
            f"the key has {len(key)} characters: at least {_MIN_KEY_CHARACTERS}, "
            "or let --new make one"
        )
    if new:
        print(key)
    print(f"sha256:{hashlib.sha256(key.encode()).hexdigest()}")
