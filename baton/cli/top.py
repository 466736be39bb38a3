"""`baton top`: the cluster, live."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.errors import Unreachable
from baton.cli.options import DEFAULT_ENDPOINT, AdminToken, Endpoint, Json

if TYPE_CHECKING:
    from baton.cli.top_view import Rates

Frames = Iterator[tuple[Any, "Rates"]]


def register(app: typer.Typer) -> None:
    app.command("top")(top)


def top(
    interval: Annotated[float, typer.Option(min=0.1, max=60.0, metavar="SECONDS", help="Between two looks")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One look, with rates over one interval")] = False,
    as_json: Json = False,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    admin_token: AdminToken = "",
) -> None:
    """Show nodes, load, cache, hand-offs and latencies, live.

    Ctrl-C ends it. Where there is no terminal it prints one look after the other; --json prints one object a line.
    """
    from baton.cli.client import admin, connected
    from baton.cli.watching import watching

    with connected(endpoint) as channel, watching(channel, interval, admin(admin_token)) as answers:
        frames = islice(_frames(answers), 1, 2) if once else _frames(answers)
        try:
            _show(frames, as_json=as_json, live=not once and sys.stdout.isatty())
        except KeyboardInterrupt:
            return
    if not once:
        raise Unreachable("the coordinator has stopped")


def _frames(answers: Iterator[Any]) -> Frames:
    """Each status, with what has happened since the one before."""
    from baton.cli.top_view import rates

    before = None
    for answer in answers:
        yield answer, rates(before, answer)
        before = answer


def _show(frames: Frames, *, as_json: bool, live: bool) -> None:
    if as_json:
        from baton.cli.plain import to_plain

        for status, speed in frames:
            print(json.dumps({**to_plain(status), "rates": asdict(speed)}), flush=True)
        return
    from rich.live import Live

    from baton.cli.screen import screen
    from baton.cli.top_view import render

    console = screen()
    if not live:
        for status, speed in frames:
            console.print(render(status, speed))
        return
    with Live(console=console, screen=True, auto_refresh=False) as view:
        for status, speed in frames:
            view.update(render(status, speed), refresh=True)
