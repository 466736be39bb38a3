"""Commands that are documented and not built yet. They say so, whatever their arguments."""

from collections.abc import Callable

import typer

from baton.cli.errors import Bad

COMMANDS = {
    "ratio": "Show or change the prefill:decode ratio",
    "plan": "Recommend a ratio for a workload",
}


def not_available(what: str) -> Bad:
    return Bad(f"{what} is not available in this version")


def register(app: typer.Typer) -> None:
    for name, text in COMMANDS.items():
        app.command(
            name,
            help=text + ".",
            rich_help_panel="Not available in this version",
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(_refusal(name))


def _refusal(name: str) -> Callable[[], None]:
    def refuse() -> None:
        raise not_available(f"baton {name}")

    return refuse
