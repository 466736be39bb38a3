"""`baton explain`: show the timing, reuse, candidates and attempts of one request."""

import json
from typing import Annotated

import typer

from baton.cli.common.options import DEFAULT_ENDPOINT, AdminTokenOption, EndpointOption, JsonOption


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
    as_json: JsonOption = False,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    admin_token: AdminTokenOption = "",
) -> None:
    """Show where the time of REQUEST_ID went.

    Works while it runs, and for the last requests that have ended (`--explain-keep` of `baton up`).
    Exits with 1 for one that is not known.
    """
    from baton.cli.client.grpc_channel import CALL_TIMEOUT, admin_metadata, coordinator_channel
    from baton.cli.views.message_dict import message_to_dict
    from baton.pb import cluster_pb2, cluster_pb2_grpc

    with coordinator_channel(endpoint) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        request = cluster_pb2.ExplainRequest(request_id=request_id)
        answer = stub.Explain(request, timeout=CALL_TIMEOUT, metadata=admin_metadata(admin_token))
    if as_json:
        print(json.dumps(message_to_dict(answer)))
        return
    from baton.cli.views.console import make_console
    from baton.cli.views.explanation import render_explanation

    make_console().print(render_explanation(answer))
