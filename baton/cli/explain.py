"""`baton explain`: where one request's time went, what was reused, who was considered and how each attempt ended."""

import json
from typing import Annotated

import typer

from baton.cli.options import DEFAULT_ENDPOINT, AdminToken, Endpoint, Json

CALL_TIMEOUT = 15.0  # seconds


def register(app: typer.Typer) -> None:
    app.command("explain")(explain)


def explain(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST_ID",
            help="Of an answer (its header x-baton-request-id, its id), or a client's x-request-id",
        ),
    ],
    as_json: Json = False,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    admin_token: AdminToken = "",
) -> None:
    """Show where the time of REQUEST_ID went.

    Works while it runs, and for the last requests that have ended (`--explain-keep` of `baton up`). Exits with 1 for
    one that is not known.
    """
    from baton.cli.client import admin, connected
    from baton.cli.plain import to_plain
    from baton.pb import cluster_pb2, cluster_pb2_grpc

    with connected(endpoint) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        request = cluster_pb2.ExplainRequest(request_id=request_id)
        answer = stub.Explain(request, timeout=CALL_TIMEOUT, metadata=admin(admin_token))
    if as_json:
        print(json.dumps(to_plain(answer)))
        return
    from baton.cli.screen import screen
    from baton.cli.waterfall import render

    screen().print(render(answer))
