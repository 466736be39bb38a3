"""`baton audit`: does every block ledger balance, and has every held block a live owner?"""

import json
import threading
from typing import Annotated, Any

import typer

from baton import clock
from baton.cli.errors import EXIT_BAD
from baton.cli.options import DEFAULT_ENDPOINT, AdminToken, Endpoint, Json

CALL_TIMEOUT = 15.0  # seconds


def register(app: typer.Typer) -> None:
    app.command("audit")(audit)


def audit(
    settle: Annotated[
        float, typer.Option(min=0.0, help="Seconds until a second look at blocks whose owner seems to be gone")
    ] = 1.0,
    as_json: Json = False,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    admin_token: AdminToken = "",
) -> None:
    """Check the block ledger of every node and pool.

    Exits with 1 if one does not balance, a block has no live owner or a node is silent.
    """
    from baton.cli.client import admin, connected
    from baton.cli.ledger_check import faults
    from baton.pb import cluster_pb2_grpc

    with connected(endpoint) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        metadata = admin(admin_token)
        answer, suspects = _look(stub, metadata)
        if suspects:  # what a request that just ended left is given back within moments; a leak stays
            threading.Event().wait(settle)
            answer, again = _look(stub, metadata)
            suspects &= again
    found = faults(answer.ledgers, answer.silent)
    found += [f"{held.node}: {held.owner} holds blocks {held.state}, and is no live request" for held in suspects]
    if as_json:
        _print_json(answer, found)
    else:
        _print_table(answer, found)
    if found:
        raise typer.Exit(EXIT_BAD)


def _look(stub: Any, metadata: Any) -> tuple[Any, set[Any]]:
    """The ledgers, and what is held on nodes that were idle before and after."""
    from baton.cli.ledger_check import idle_nodes, ownerless, pinned_by_nobody
    from baton.pb import cluster_pb2

    started = clock.steady()
    before = stub.Status(cluster_pb2.StatusRequest(), timeout=CALL_TIMEOUT, metadata=metadata)
    answer = stub.Ledger(cluster_pb2.LedgerRequest(), timeout=CALL_TIMEOUT, metadata=metadata)
    after = stub.Status(cluster_pb2.StatusRequest(), timeout=CALL_TIMEOUT, metadata=metadata)
    elapsed = clock.steady() - started
    suspects = ownerless(answer.ledgers, idle_nodes(before, after), elapsed)
    return answer, suspects | pinned_by_nobody(answer.ledgers, before, after)


def _print_json(answer: Any, found: list[str]) -> None:
    from baton.cli.plain import to_plain

    print(json.dumps({"ok": not found, "faults": found, **to_plain(answer)}))


def _print_table(answer: Any, found: list[str]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from baton.cli.ledger_check import STATES
    from baton.cli.screen import screen

    table = Table("node", box=None, header_style="bold")
    for heading in (*STATES, "total"):
        table.add_column(heading.replace("_", " "), justify="right")
    for ledger in sorted(answer.ledgers, key=lambda ledger: str(ledger.node)):
        table.add_row(escape(ledger.node), *(str(getattr(ledger, state)) for state in (*STATES, "total")))
    console = screen()
    console.print(table)
    for ledger in answer.ledgers:
        for owner in ledger.owners:
            held = f"{owner.owner} {owner.state} {owner.blocks} blocks for {owner.age_seconds:.1f} s"
            console.print(escape(f"  {ledger.node}: {held}"))
    for line in found:
        console.print(f"[red]{escape(line)}[/]")
    if not found:
        console.print("[green]every ledger balances[/]")
