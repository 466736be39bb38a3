"""`baton ratio`: show or change how many nodes prefill and how many decode, while serving."""

import json
import sys
from typing import Annotated, Any

import typer

from baton.cli import ratio_control
from baton.cli.common.errors import EXIT_INTERRUPTED, CommandFailed
from baton.cli.common.options import DEFAULT_ENDPOINT, AdminTokenOption, EndpointOption, JsonOption

_WATCH_INTERVAL = 0.1  # seconds, at most

SplitArgument = Annotated[
    str,
    typer.Argument(metavar="P:D", help="Nodes that prefill, nodes that decode; all live ones"),
]
FlipTimeoutOption = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        metavar="SECONDS",
        help="What a node still has then is placed again elsewhere (--flip-timeout)",
    ),
]
WaitOption = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Return when every switch has counted, or now")
]


def register(app: typer.Typer) -> None:
    ratio = typer.Typer(help="Show or change the prefill:decode ratio, live.", no_args_is_help=True)
    ratio.command("show")(show_ratio)
    ratio.command("set")(set_ratio)
    ratio_control.register(ratio)
    app.add_typer(ratio, name="ratio")


def show_ratio(
    as_json: JsonOption = False,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    admin_token: AdminTokenOption = "",
) -> None:
    """Show the present and the requested ratio, and the nodes that are changing their role."""
    from baton.cli.client.grpc_channel import CALL_TIMEOUT, admin_metadata, coordinator_channel
    from baton.cli.views.message_dict import message_to_dict
    from baton.cli.views.ratio_text import format_ratio, format_ratio_control, format_role_switch
    from baton.pb import cluster_pb2, cluster_pb2_grpc

    with coordinator_channel(endpoint) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        answer = stub.GetRatio(
            cluster_pb2.GetRatioRequest(),
            timeout=CALL_TIMEOUT,
            metadata=admin_metadata(admin_token),
        )
    if as_json:
        print(json.dumps(message_to_dict(answer)))
        return
    print(format_ratio(answer))
    print(format_ratio_control(answer))
    for switch in [*answer.over, *answer.switches]:
        print(f"  {format_role_switch(switch)}")
    print(f"possible with the live nodes: {answer.possible}")


def set_ratio(
    ratio: SplitArgument,
    flip_timeout: FlipTimeoutOption = None,
    wait: WaitOption = True,
    as_json: JsonOption = False,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    admin_token: AdminTokenOption = "",
) -> None:
    """Bring the cluster to P:D while it serves, and report each node's switch.

    Nodes drain their old role and take the new one in place; weights and cache stay. A probe
    request goes through each before it counts. Exits with 2 if P + D are not the live nodes, and
    names what is possible. Ends `auto`.
    """
    from baton.cli.client.grpc_channel import admin_metadata, coordinator_channel
    from baton.cli.views.message_dict import message_to_dict
    from baton.cli.views.ratio_text import format_ratio, format_role_switch

    metadata = admin_metadata(admin_token)
    with coordinator_channel(endpoint) as channel:
        answer = _request_ratio(channel, ratio, flip_timeout, metadata)
        if wait:
            try:
                answer = _wait_until_settled(channel, answer.generation, metadata, show=not as_json)
            except KeyboardInterrupt:
                sys.stderr.write(
                    f"\nthe cluster goes on to {ratio}; `baton ratio set` changes that\n"
                )
                raise SystemExit(EXIT_INTERRUPTED) from None
    own_switches = [switch for switch in answer.over if switch.generation == answer.generation]
    if as_json:
        print(
            json.dumps(
                {
                    **message_to_dict(answer),
                    "over": [message_to_dict(switch) for switch in own_switches],
                }
            )
        )
        return
    for switch in own_switches:
        print(format_role_switch(switch))
    print(format_ratio(answer))


def _request_ratio(channel: Any, ratio: str, flip_timeout: float | None, metadata: Any) -> Any:
    """Send SetRatio. Raises ConfigError (exit code 2) for an impossible ratio."""
    import grpc

    from baton.cli.client.grpc_channel import CALL_TIMEOUT
    from baton.errors import ConfigError, InvalidRequest
    from baton.pb import cluster_pb2, cluster_pb2_grpc
    from baton.role_split import parse_split

    try:
        split = parse_split(ratio)
        request = cluster_pb2.SetRatioRequest(
            prefill=split.prefill_nodes,
            decode=split.decode_nodes,
            flip_timeout_seconds=flip_timeout,
        )
        return cluster_pb2_grpc.ClusterStub(channel).SetRatio(
            request, timeout=CALL_TIMEOUT, metadata=metadata
        )
    except InvalidRequest as error:
        raise ConfigError(error.message, param="ratio") from None
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
            raise
        raise ConfigError(error.details() or "the ratio was refused", param="ratio") from None


def _wait_until_settled(channel: Any, generation: int, metadata: Any, *, show: bool) -> Any:
    """Return the ratio once nothing is left to do.

    Raises CommandFailed when another target replaced it, or the coordinator stopped.
    """
    from baton.cli.client.status_watch import watch_status
    from baton.cli.views.progress_line import ProgressLine
    from baton.cli.views.ratio_text import format_ratio_progress

    with (
        ProgressLine(sys.stderr if show else None) as progress,
        watch_status(channel, _WATCH_INTERVAL, metadata) as answers,
    ):
        for answer in answers:
            ratio = answer.ratio
            if ratio.generation != generation:
                raise CommandFailed(
                    "another ratio was requested meanwhile: "
                    f"{ratio.target_prefill}:{ratio.target_decode}"
                )
            if ratio.settled:
                return ratio
            progress.show_line(format_ratio_progress(ratio))
    raise CommandFailed("the coordinator stopped before the ratio was reached")
