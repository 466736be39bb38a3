"""`baton ratio advise | auto | manual`: recommend a ratio, and say who may change it."""

import json
from typing import Annotated, Any

import typer

from baton.cli.common.options import DEFAULT_ENDPOINT, AdminTokenOption, EndpointOption, JsonOption

_SLO_OPTION_HELP = (
    "As in ttft=500ms,tpot=50ms, either or both; without it, what `auto` keeps, or --slo of `up`"
)
SloOption = Annotated[str, typer.Option("--slo", metavar="SLO", help=_SLO_OPTION_HELP)]


def register(ratio: typer.Typer) -> None:
    ratio.command("advise")(advise)
    ratio.command("auto")(auto)
    ratio.command("manual")(manual)


def advise(
    slo: SloOption = "",
    as_json: JsonOption = False,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    admin_token: AdminTokenOption = "",
) -> None:
    """Recommend a ratio for what was asked in the last minute, with forecasts and the command that
    applies it."""
    from baton.cli.views.console import make_console
    from baton.cli.views.message_dict import message_to_dict
    from baton.cli.views.ratio_advice import apply_command, describe_demand, forecast_table
    from baton.pb import cluster_pb2

    answer = _call_cluster(
        "AdviseRatio",
        cluster_pb2.AdviseRatioRequest(slo=_parse_slo_option(slo)),
        endpoint,
        admin_token,
    )
    if as_json:
        print(json.dumps({**message_to_dict(answer), "command": apply_command(answer)}))
        return
    for line in describe_demand(answer):
        print(line)
    make_console().print(forecast_table(answer))
    print(answer.reason)
    print(f"to apply: {apply_command(answer)}" if apply_command(answer) else "nothing to do")


def auto(
    slo: SloOption = "",
    flip_timeout: Annotated[
        float | None,
        typer.Option(
            min=0.0, metavar="SECONDS", help="What a node still has then is placed again elsewhere"
        ),
    ] = None,
    as_json: JsonOption = False,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    admin_token: AdminTokenOption = "",
) -> None:
    """Let the coordinator change the ratio so that an SLO is kept, until `manual` or `set`."""
    from baton.pb import cluster_pb2

    request = cluster_pb2.AutoRatioRequest(
        slo=_parse_slo_option(slo), flip_timeout_seconds=flip_timeout
    )
    _print_ratio(_call_cluster("AutoRatio", request, endpoint, admin_token), as_json)


def manual(
    as_json: JsonOption = False,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    admin_token: AdminTokenOption = "",
) -> None:
    """Freeze the ratio: from now on it changes by `set` alone. Nodes on their way go on."""
    from baton.pb import cluster_pb2

    _print_ratio(
        _call_cluster("ManualRatio", cluster_pb2.ManualRatioRequest(), endpoint, admin_token),
        as_json,
    )


def _call_cluster(method: str, request: Any, endpoint: str, admin_token: str) -> Any:
    from baton.cli.client.grpc_channel import CALL_TIMEOUT, admin_metadata, coordinator_channel
    from baton.pb import cluster_pb2_grpc

    with coordinator_channel(endpoint) as channel:
        call = getattr(cluster_pb2_grpc.ClusterStub(channel), method)
        return call(request, timeout=CALL_TIMEOUT, metadata=admin_metadata(admin_token))


def _parse_slo_option(slo: str) -> str:
    """Return the SLO in canonical form. Raises ConfigError (exit code 2) for a malformed one."""
    from baton.errors import ConfigError, InvalidRequest
    from baton.slo import parse_slo

    try:
        return str(parse_slo(slo)) if slo else ""
    except InvalidRequest as error:
        raise ConfigError(error.message, param="slo") from None


def _print_ratio(ratio: Any, as_json: bool) -> None:
    from baton.cli.views.message_dict import message_to_dict
    from baton.cli.views.ratio_text import format_ratio, format_ratio_control

    if as_json:
        print(json.dumps(message_to_dict(ratio)))
        return
    print(format_ratio(ratio))
    print(format_ratio_control(ratio))
