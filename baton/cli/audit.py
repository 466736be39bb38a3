"""`baton audit`: check that every block ledger balances and every held block has a live owner."""

import json
import threading
from typing import Annotated, Any

import typer

from baton.cli.common.errors import EXIT_FAILURE
from baton.cli.common.options import DEFAULT_ENDPOINT, AdminTokenOption, EndpointOption, JsonOption
from baton.process import clock


def register(app: typer.Typer) -> None:
    app.command("audit")(audit)


def audit(
    settle: Annotated[
        float,
        typer.Option(
            min=0.0, help="Seconds until a second look at blocks whose owner seems to be gone"
        ),
    ] = 1.0,
    as_json: JsonOption = False,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    admin_token: AdminTokenOption = "",
) -> None:
    """Check the block ledger of every node and pool.

    Exits with 1 if one does not balance, a block has no live owner or a node is silent.
    """
    from baton.cli.checks.ledger import find_ledger_faults
    from baton.cli.client.grpc_channel import admin_metadata, coordinator_channel
    from baton.pb import cluster_pb2_grpc

    with coordinator_channel(endpoint) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        metadata = admin_metadata(admin_token)
        answer, suspects = _collect_suspects(stub, metadata)
        if suspects:
            # Blocks of a request that has just ended are released within moments; a leak stays.
            threading.Event().wait(settle)
            answer, again = _collect_suspects(stub, metadata)
            suspects &= again
    faults = find_ledger_faults(answer.ledgers, answer.silent)
    faults += [
        f"{holding.node}: {holding.owner} holds blocks {holding.state}, and is no live request"
        for holding in suspects
    ]
    if as_json:
        _print_json(answer, faults)
    else:
        _print_table(answer, faults)
    if faults:
        raise typer.Exit(EXIT_FAILURE)


def _collect_suspects(stub: Any, metadata: Any) -> tuple[Any, set[Any]]:
    """Return the ledgers, and the holdings on nodes that were idle before and after the call."""
    from baton.cli.checks.ledger import find_idle_nodes, find_ownerless_blocks, find_unowned_pins
    from baton.cli.client.grpc_channel import CALL_TIMEOUT
    from baton.pb import cluster_pb2

    started = clock.monotonic_clock()
    before = stub.Status(cluster_pb2.StatusRequest(), timeout=CALL_TIMEOUT, metadata=metadata)
    answer = stub.Ledger(cluster_pb2.LedgerRequest(), timeout=CALL_TIMEOUT, metadata=metadata)
    after = stub.Status(cluster_pb2.StatusRequest(), timeout=CALL_TIMEOUT, metadata=metadata)
    elapsed = clock.monotonic_clock() - started
    suspects = find_ownerless_blocks(answer.ledgers, find_idle_nodes(before, after), elapsed)
    return answer, suspects | find_unowned_pins(answer.ledgers, before, after)


def _print_json(answer: Any, faults: list[str]) -> None:
    from baton.cli.views.message_dict import message_to_dict

    print(json.dumps({"ok": not faults, "faults": faults, **message_to_dict(answer)}))


def _print_table(answer: Any, faults: list[str]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from baton.cli.checks.ledger import BLOCK_STATES
    from baton.cli.views.console import make_console

    table = Table("node", box=None, header_style="bold")
    for heading in (*BLOCK_STATES, "total"):
        table.add_column(heading.replace("_", " "), justify="right")
    for ledger in sorted(answer.ledgers, key=lambda ledger: str(ledger.node)):
        table.add_row(
            escape(ledger.node),
            *(str(getattr(ledger, state)) for state in (*BLOCK_STATES, "total")),
        )
    console = make_console()
    console.print(table)
    for ledger in answer.ledgers:
        for owner in ledger.owners:
            holding = (
                f"{owner.owner} {owner.state} {owner.blocks} blocks for {owner.age_seconds:.1f} s"
            )
            console.print(escape(f"  {ledger.node}: {holding}"))
    for line in faults:
        console.print(f"[red]{escape(line)}[/]")
    if not faults:
        console.print("[green]every ledger balances[/]")
