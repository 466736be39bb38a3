"""`baton ratio advise | auto | manual`: what the ratio should be, and who changes it."""

import json
from typing import Annotated, Any

import typer

from baton.cli.options import DEFAULT_ENDPOINT, AdminToken, Endpoint, Json

CALL_TIMEOUT = 15.0  # seconds
_SLO_HELP = "As in ttft=500ms,tpot=50ms, either or both; without it, what `auto` keeps, or --slo of `up`"
SloOption = Annotated[str, typer.Option("--slo", metavar="SLO", help=_SLO_HELP)]


def register(ratio: typer.Typer) -> None:
    ratio.command("advise")(advise)
    ratio.command("auto")(auto)
    ratio.command("manual")(manual)


def advise(
    slo: SloOption = "", as_json: Json = False, endpoint: Endpoint = DEFAULT_ENDPOINT, admin_token: AdminToken = ""
) -> None:
    """Recommend a ratio for what was asked in the last minute, with forecasts and the command that applies it."""
    from baton.cli.advice_view import apply, demand, table
    from baton.cli.plain import to_plain
    from baton.cli.screen import screen
    from baton.pb import cluster_pb2

    answer = _call("AdviseRatio", cluster_pb2.AdviseRatioRequest(slo=_checked(slo)), endpoint, admin_token)
    if as_json:
        print(json.dumps({**to_plain(answer), "command": apply(answer)}))
        return
    for line in demand(answer):
        print(line)
    screen().print(table(answer))
    print(answer.reason)
    print(f"to apply: {apply(answer)}" if apply(answer) else "nothing to do")


def auto(
    slo: SloOption = "",
    flip_timeout: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="SECONDS", help="What a node still has then is placed again elsewhere"),
    ] = None,
    as_json: Json = False,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    admin_token: AdminToken = "",
) -> None:
    """Let the coordinator change the ratio so that an SLO is kept, until `manual` or `set`."""
    from baton.pb import cluster_pb2

    request = cluster_pb2.AutoRatioRequest(slo=_checked(slo), flip_timeout_seconds=flip_timeout)
    _tell(_call("AutoRatio", request, endpoint, admin_token), as_json)


def manual(as_json: Json = False, endpoint: Endpoint = DEFAULT_ENDPOINT, admin_token: AdminToken = "") -> None:
    """Freeze the ratio: from now on it changes by `set` alone. Nodes on their way go on."""
    from baton.pb import cluster_pb2

    _tell(_call("ManualRatio", cluster_pb2.ManualRatioRequest(), endpoint, admin_token), as_json)


def _call(method: str, request: Any, endpoint: str, admin_token: str) -> Any:
    from baton.cli.client import admin, connected
    from baton.pb import cluster_pb2_grpc

    with connected(endpoint) as channel:
        call = getattr(cluster_pb2_grpc.ClusterStub(channel), method)
        return call(request, timeout=CALL_TIMEOUT, metadata=admin(admin_token))


def _checked(slo: str) -> str:
    """Raises ConfigError, which is exit code 2, for a text that is no objective."""
    from baton.errors import ConfigError, InvalidRequest
    from baton.slo import parse_slo

    try:
        return str(parse_slo(slo)) if slo else ""
    except InvalidRequest as error:
        raise ConfigError(error.message, param="slo") from None


def _tell(ratio: Any, as_json: bool) -> None:
    from baton.cli.plain import to_plain
    from baton.cli.ratio_view import headline, steering

    if as_json:
        print(json.dumps(to_plain(ratio)))
        return
    print(headline(ratio))
    print(steering(ratio))
