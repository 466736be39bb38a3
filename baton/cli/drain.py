"""`baton drain` and `baton undrain`: take a node out of service without losing a request, and put
it back."""

import json
import sys
from typing import Annotated, Any

import typer

from baton.cli.common.errors import EXIT_INTERRUPTED, CommandFailed
from baton.cli.common.options import DEFAULT_ENDPOINT, AdminTokenOption, EndpointOption, JsonOption

_WATCH_INTERVAL = 0.25  # seconds, at most
NodeArgument = Annotated[
    str, typer.Argument(metavar="NODE", help="A name that `baton status` shows")
]


def register(app: typer.Typer) -> None:
    app.command("drain")(drain)
    app.command("undrain")(undrain)


def drain(
    node: NodeArgument,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Then place elsewhere what is left; without it, all may finish",
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return when the node is empty, or at once")
    ] = True,
    as_json: JsonOption = False,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    admin_token: AdminTokenOption = "",
) -> None:
    """Give NODE no new work, and wait until it is empty.

    What it holds goes on to its end. The node stays out of service, also when it restarts, until
    `baton undrain` (or until the coordinator restarts, which forgets it).
    """
    from baton.cli.client.grpc_channel import CALL_TIMEOUT, admin_metadata, coordinator_channel
    from baton.pb import cluster_pb2, cluster_pb2_grpc

    with coordinator_channel(endpoint) as channel:
        metadata = admin_metadata(admin_token)
        request = cluster_pb2.DrainRequest(node=node, timeout_seconds=timeout)
        answer = cluster_pb2_grpc.ClusterStub(channel).Drain(
            request, timeout=CALL_TIMEOUT, metadata=metadata
        )
        if answer.warning:
            sys.stderr.write(f"warning: {answer.warning}\n")
        service = answer.service
        if wait:
            try:
                service = _wait_until_drained(channel, node, metadata, show=not as_json)
            except KeyboardInterrupt:
                sys.stderr.write(
                    f"\n{node} goes on draining; `baton undrain {node}` puts it back\n"
                )
                raise SystemExit(EXIT_INTERRUPTED) from None
    _print_service(node, service, as_json)


def undrain(
    node: NodeArgument,
    as_json: JsonOption = False,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    admin_token: AdminTokenOption = "",
) -> None:
    """Put NODE back into service."""
    from baton.cli.client.grpc_channel import CALL_TIMEOUT, admin_metadata, coordinator_channel
    from baton.pb import cluster_pb2, cluster_pb2_grpc

    with coordinator_channel(endpoint) as channel:
        request = cluster_pb2.UndrainRequest(node=node)
        stub = cluster_pb2_grpc.ClusterStub(channel)
        answer = stub.Undrain(request, timeout=CALL_TIMEOUT, metadata=admin_metadata(admin_token))
    _print_service(node, answer.service, as_json)


def _wait_until_drained(channel: Any, name: str, metadata: Any, *, show: bool) -> str:
    """Return the service state in which the wait ended.

    Raises CommandFailed when the node is put back into service meanwhile.
    """
    from baton.cli.client.status_watch import watch_status
    from baton.cli.views.progress_line import ProgressLine

    with (
        ProgressLine(sys.stderr if show else None) as progress,
        watch_status(channel, _WATCH_INTERVAL, metadata) as answers,
    ):
        for answer in answers:
            node = next((candidate for candidate in answer.nodes if candidate.name == name), None)
            if node is None:
                return "gone"
            if node.service == "in":
                raise CommandFailed(f"{name} was put back into service while it was draining")
            if node.service == "drained":
                return "drained"
            progress.show_line(format_remaining(node))
    raise CommandFailed(f"the coordinator stopped while {name} was draining")


def format_remaining(node: Any) -> str:
    """Return one line about what a draining node still has."""
    stats = node.stats
    held_blocks = (
        stats.blocks_reserved
        + stats.blocks_writing
        + stats.blocks_in_use
        + stats.blocks_quarantined
    )
    deadline_text = (
        f", what is left in {node.drain_seconds_left:.0f} s is placed again"
        if node.drain_seconds_left
        else ""
    )
    return f"{node.name}: {node.placed} requests, {held_blocks} blocks held{deadline_text}"


_SERVICE_WORDS = {
    "in": "is in service",
    "draining": "is draining",
    "drained": "is drained: nothing is left there",
    "gone": "has left the cluster, and stays out of service when it comes back",
}


def _print_service(node: str, service: str, as_json: bool) -> None:
    print(
        json.dumps({"node": node, "service": service})
        if as_json
        else f"{node} {_SERVICE_WORDS.get(service, service)}"
    )
