"""`baton ratio`: how many nodes prefill and how many decode, shown and changed while traffic flows."""

import json
import sys
from typing import Annotated, Any

import typer

from baton.cli import ratio_steering
from baton.cli.errors import Bad
from baton.cli.generate import EXIT_INTERRUPTED
from baton.cli.options import DEFAULT_ENDPOINT, AdminToken, Endpoint, Json

CALL_TIMEOUT = 15.0  # seconds
_LOOK_EVERY = 0.1  # seconds, at most


def register(app: typer.Typer) -> None:
    ratio = typer.Typer(help="Show or change the prefill:decode ratio, live.", no_args_is_help=True)
    ratio.command("show")(show)
    ratio.command("set")(change)
    ratio_steering.register(ratio)
    app.add_typer(ratio, name="ratio")


def show(as_json: Json = False, endpoint: Endpoint = DEFAULT_ENDPOINT, admin_token: AdminToken = "") -> None:
    """Show the ratio, the one that was asked for, and which nodes are on their way to another role."""
    from baton.cli.client import admin, connected
    from baton.cli.plain import to_plain
    from baton.cli.ratio_view import headline, line, steering
    from baton.pb import cluster_pb2, cluster_pb2_grpc

    with connected(endpoint) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        answer = stub.GetRatio(cluster_pb2.GetRatioRequest(), timeout=CALL_TIMEOUT, metadata=admin(admin_token))
    if as_json:
        print(json.dumps(to_plain(answer)))
        return
    print(headline(answer))
    print(steering(answer))
    for switch in [*answer.over, *answer.switches]:
        print(f"  {line(switch)}")
    print(f"possible with the live nodes: {answer.possible}")


def change(
    ratio: Annotated[str, typer.Argument(metavar="P:D", help="Nodes that prefill, nodes that decode; all live ones")],
    flip_timeout: Annotated[
        float | None,
        typer.Option(
            min=0.0, metavar="SECONDS", help="What a node still has then is placed again elsewhere (--flip-timeout)"
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return when every switch has counted, or now")] = True,
    as_json: Json = False,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    admin_token: AdminToken = "",
) -> None:
    """Bring the cluster to P:D while it serves, and report each node's switch.

    Nodes drain their old role and take the new one in place; weights and cache stay. A probe request goes through each
    before it counts. Exits with 2 if P + D are not the live nodes, and names what is possible. Ends `auto`.
    """
    from baton.cli.client import admin, connected
    from baton.cli.plain import to_plain
    from baton.cli.ratio_view import headline, line

    metadata = admin(admin_token)
    with connected(endpoint) as channel:
        answer = _set(channel, ratio, flip_timeout, metadata)
        if wait:
            try:
                answer = _until_settled(channel, answer.generation, metadata, show=not as_json)
            except KeyboardInterrupt:
                sys.stderr.write(f"\nthe cluster goes on to {ratio}; `baton ratio set` changes that\n")
                raise SystemExit(EXIT_INTERRUPTED) from None
    mine = [switch for switch in answer.over if switch.generation == answer.generation]
    if as_json:
        print(json.dumps({**to_plain(answer), "over": [to_plain(switch) for switch in mine]}))
        return
    for switch in mine:
        print(line(switch))
    print(headline(answer))


def _set(channel: Any, ratio: str, flip_timeout: float | None, metadata: Any) -> Any:
    """Raises ConfigError, which is exit code 2, for a ratio that cannot be."""
    import grpc

    from baton.errors import ConfigError, InvalidRequest
    from baton.pb import cluster_pb2, cluster_pb2_grpc
    from baton.ratio import parse_split

    try:
        split = parse_split(ratio)
        request = cluster_pb2.SetRatioRequest(
            prefill=split.prefill, decode=split.decode, flip_timeout_seconds=flip_timeout
        )
        return cluster_pb2_grpc.ClusterStub(channel).SetRatio(request, timeout=CALL_TIMEOUT, metadata=metadata)
    except InvalidRequest as error:
        raise ConfigError(error.message, param="ratio") from None
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
            raise
        raise ConfigError(error.details() or "the ratio was refused", param="ratio") from None


def _until_settled(channel: Any, generation: int, metadata: Any, *, show: bool) -> Any:
    """The ratio when nothing is left to do. Raises Bad when another target took its place, or nobody knows it."""
    from baton.cli.progress import Progress
    from baton.cli.ratio_view import progress
    from baton.cli.watching import watching

    with Progress(sys.stderr if show else None) as shown, watching(channel, _LOOK_EVERY, metadata) as answers:
        for answer in answers:
            ratio = answer.ratio
            if ratio.generation != generation:
                raise Bad(f"another ratio was asked for meanwhile: {ratio.target_prefill}:{ratio.target_decode}")
            if ratio.settled:
                return ratio
            shown.show(progress(ratio))
    raise Bad("the coordinator stopped before the ratio was reached")
