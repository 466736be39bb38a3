"""`baton status`: show the nodes, their load and their caches once."""

import json
from typing import Any

import typer

from baton.cli.common.errors import EXIT_FAILURE
from baton.cli.common.options import DEFAULT_ENDPOINT, AdminTokenOption, EndpointOption, JsonOption


def register(app: typer.Typer) -> None:
    app.command("status")(status)


def status(
    as_json: JsonOption = False,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    admin_token: AdminTokenOption = "",
) -> None:
    """Show nodes, roles, load and cache.

    Exits with 1 while the cluster is not ready.
    """
    from baton.cli.client.grpc_channel import admin_metadata, coordinator_channel
    from baton.cli.views.message_dict import message_to_dict
    from baton.pb import cluster_pb2, cluster_pb2_grpc

    with coordinator_channel(endpoint) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        answer = stub.Status(
            cluster_pb2.StatusRequest(), timeout=10.0, metadata=admin_metadata(admin_token)
        )
    if as_json:
        print(json.dumps(message_to_dict(answer)))
    else:
        _print_table(answer)
    if not answer.ready:
        raise typer.Exit(EXIT_FAILURE)


def _print_table(answer: Any) -> None:
    from rich.markup import escape
    from rich.table import Table

    from baton.cli.views.console import make_console
    from baton.cli.views.device_table import build_device_table
    from baton.cli.views.ratio_text import format_ratio_progress

    console = make_console()
    state = "[green]ready[/]" if answer.ready else f"[red]not ready[/]: {escape(answer.reason)}"
    model = escape(answer.model or "-")
    console.print(
        f"{state}  model {model}  mode {answer.mode}  "
        f"queued {answer.queued}  running {answer.running}"
    )
    console.print(escape(format_ratio_progress(answer.ratio)))
    for notice in answer.notices:
        console.print(f"[yellow]{escape(notice)}[/]")
    console.print(_format_degradation(answer))
    table = Table(box=None, header_style="bold")
    for heading in ("node", "role", "service", "pid", "placed", "running", "waiting"):
        table.add_column(heading, no_wrap=True)
    for heading in ("blocks free", "cached", "in use", "held", "heard ago", "up"):
        table.add_column(heading, justify="right")
    for node in sorted(answer.nodes, key=lambda node: str(node.name)):
        table.add_row(*map(escape, _node_row(node)))
    console.print(table)
    if devices := build_device_table(sorted(answer.nodes, key=lambda node: str(node.name))):
        console.print(devices)
    for node in answer.nodes:
        if slots := node.stats.counters["baton_pool_disk_slots"]:
            used = node.stats.counters["baton_pool_disk_slots_used"]
            console.print(f"{node.name}: {used:.0f} of {slots:.0f} disk slots used")


def _format_degradation(answer: Any) -> str:
    """Say which degradation steps are active and which is next. `--json` has the details."""
    active_steps = [
        f"{step.step} for {step.seconds:.0f} s" for step in answer.degradation if step.active
    ]
    able = [step.step for step in answer.degradation if not step.active and not step.cannot_help]
    given_up = f", given up: [yellow]{', '.join(active_steps)}[/]" if active_steps else ""
    next_step = able[0] if able else "no step available"
    return f"pressure {answer.pressure:.2f}{given_up}, next at 1: {next_step}"


def _node_row(node: Any) -> list[str]:
    stats = node.stats
    held_blocks = stats.blocks_reserved + stats.blocks_writing + stats.blocks_quarantined
    numbers = (node.pid, node.placed, stats.running, stats.waiting)
    return [
        node.name,
        node.role,
        node.service or "in",
        *(str(number) for number in numbers),
        f"{stats.blocks_free}/{stats.blocks_total}",
        str(stats.blocks_cached),
        str(stats.blocks_in_use),
        str(held_blocks),
        f"{node.heard_seconds_ago:.1f} s",
        f"{node.joined_seconds_ago:.0f} s",
    ]
