"""Commands that are documented and not built yet. They say so, whatever their arguments."""

from collections.abc import Callable, Mapping

import typer

from baton.cli.errors import Bad

COMMANDS = {
    "plan": "Recommend a ratio for a workload",
}


def not_available(what: str) -> Bad:
    return Bad(f"{what} is not available in this version")


def register(app: typer.Typer) -> None:
    refuse_later(app, "", COMMANDS)


def refuse_later(app: typer.Typer, group: str, commands: Mapping[str, str]) -> None:
    """Give `app`, the commands of `group`, some that refuse when they are called; with their help texts."""
    for name, text in commands.items():
        app.command(
            name,
            help=text + ".",
            rich_help_panel="Not available in this version",
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(_refusal(f"{group} {name}".strip()))


def _refusal(name: str) -> Callable[[], None]:
    def refuse() -> None:
        raise not_available(f"baton {name}")

    return refuse
