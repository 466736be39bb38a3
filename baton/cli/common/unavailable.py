"""Commands that are documented but not built yet; each one refuses with any arguments."""

from collections.abc import Callable, Mapping

import typer

from baton.cli.common.errors import CommandFailed

UNAVAILABLE_COMMANDS = {
    "plan": "Recommend a ratio for a workload",
}


def not_available_error(name: str) -> CommandFailed:
    return CommandFailed(f"{name} is not available in this version")


def register(app: typer.Typer) -> None:
    register_unavailable(app, "", UNAVAILABLE_COMMANDS)


def register_unavailable(app: typer.Typer, group: str, commands: Mapping[str, str]) -> None:
    """Register `commands` (name to help text) in `app`, each of which refuses when called.

    `group` is the command group that `app` stands for, or empty.
    """
    for name, text in commands.items():
        app.command(
            name,
            help=text + ".",
            rich_help_panel="Not available in this version",
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(_make_refusal(f"{group} {name}".strip()))


def _make_refusal(name: str) -> Callable[[], None]:
    def refuse() -> None:
        raise not_available_error(f"baton {name}")

    return refuse
