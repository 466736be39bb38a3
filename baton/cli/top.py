"""`baton top`: show the cluster live."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.common.errors import EndpointUnreachable
from baton.cli.common.options import DEFAULT_ENDPOINT, AdminTokenOption, EndpointOption, JsonOption

if TYPE_CHECKING:
    from baton.cli.views.top_table import ClusterRates

StatusFrames = Iterator[tuple[Any, "ClusterRates"]]


def register(app: typer.Typer) -> None:
    app.command("top")(top)


def top(
    interval: Annotated[
        float, typer.Option(min=0.1, max=60.0, metavar="SECONDS", help="Between two looks")
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="One look, with rates over one interval")
    ] = False,
    as_json: JsonOption = False,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    admin_token: AdminTokenOption = "",
) -> None:
    """Show nodes, load, cache, hand-offs and latencies, live.

    Ctrl-C ends it. Where there is no terminal it prints one look after the other; --json prints one
    object a line.
    """
    from baton.cli.client.grpc_channel import admin_metadata, coordinator_channel
    from baton.cli.client.status_watch import watch_status

    with (
        coordinator_channel(endpoint) as channel,
        watch_status(channel, interval, admin_metadata(admin_token)) as answers,
    ):
        frames = islice(_status_frames(answers), 1, 2) if once else _status_frames(answers)
        try:
            _print_frames(frames, as_json=as_json, live=not once and sys.stdout.isatty())
        except KeyboardInterrupt:
            return
    if not once:
        raise EndpointUnreachable("the coordinator has stopped")


def _status_frames(answers: Iterator[Any]) -> StatusFrames:
    """Yield each status with the rates since the previous one."""
    from baton.cli.views.top_table import compute_rates

    before = None
    for answer in answers:
        yield answer, compute_rates(before, answer)
        before = answer


def _print_frames(frames: StatusFrames, *, as_json: bool, live: bool) -> None:
    if as_json:
        from baton.cli.views.message_dict import message_to_dict

        for status, rates in frames:
            print(json.dumps({**message_to_dict(status), "rates": asdict(rates)}), flush=True)
        return
    from rich.live import Live

    from baton.cli.views.console import make_console
    from baton.cli.views.top_table import render_top

    console = make_console()
    if not live:
        for status, rates in frames:
            console.print(render_top(status, rates))
        return
    with Live(console=console, screen=True, auto_refresh=False) as view:
        for status, rates in frames:
            view.update(render_top(status, rates), refresh=True)
