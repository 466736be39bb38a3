"""Command-line options, generated from the fields of Config or shared by several commands."""

import inspect
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import msgspec
import typer

from baton.config import flags as config_flags
from baton.config.resolve import get_field_choices, get_field_help, resolve_config
from baton.config.settings import Config

EndpointOption = Annotated[
    str,
    typer.Option(
        "--endpoint",
        envvar="BATON_ENDPOINT",
        metavar="HOST:PORT",
        help="The coordinator's gRPC port",
    ),
]
DEFAULT_ENDPOINT = "127.0.0.1:50051"
ApiKeyOption = Annotated[
    str,
    typer.Option(
        "--api-key",
        envvar="BATON_API_KEY",
        metavar="KEY|@FILE",
        help="Needed if `up` was given one",
    ),
]
AdminTokenOption = Annotated[
    str,
    typer.Option(
        "--admin-token",
        envvar="BATON_ADMIN_TOKEN",
        metavar="KEY|@FILE",
        help="Needed if `up` was given one",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON")]

# The field that opens each panel of `up --help`; a panel reaches to the next one.
PANEL_FIRST_FIELDS = {
    "model": "The model",
    "prefill": "The cluster",
    "host": "Where things listen",
    "api_key": "Who may do what",
    "segment_dir": "The transfer plane",
    "heartbeat": "Patience",
    "paced_prefill_us_per_token": "The paced engine",
    "log_level": "Logs",
}
# A node's own settings, which `up` decides for each node.
PER_NODE_FIELDS = frozenset(
    {"coordinator", "name", "listen", "advertise", "health_port", "host_id"}
)


def add_config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(settings: Config, **own)` an option for each setting, --config and --set.

    The wrapper resolves flag > environment > file > default. It raises ConfigError that names the
    field, the value and its source.
    """
    own = [
        p
        for p in inspect.signature(command, eval_str=True).parameters.values()
        if p.name != "settings"
    ]
    parameters = [*own, *_file_parameters(), *_field_parameters()]

    def wrapper(**values: Any) -> None:
        mine = {parameter.name: values.pop(parameter.name) for parameter in own}
        command(settings=_resolve_options(values), **mine)

    wrapper.__doc__ = command.__doc__
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def _resolve_options(values: Mapping[str, Any]) -> Config:
    typed = {
        key: value
        for key, value in values.items()
        if value is not None and key in Config.__struct_fields__
    }
    assignments = values["config_assignments"] or []
    return resolve_config(
        config_flags.get_typed_settings(Namespace(config_assignments=assignments, **typed)),
        file=values["config_file"],
    )


def _keyword_parameter(name: str, kind: Any, info: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )


def _file_parameters() -> list[inspect.Parameter]:
    file = typer.Option("--config", metavar="FILE", help="TOML file of settings (BATON_CONFIG)")
    assignments = typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any setting by its name, such as dtype=float32; may be repeated",
    )
    return [
        _keyword_parameter("config_file", str, file),
        _keyword_parameter("config_assignments", list[str], assignments),
    ]


def _field_parameters() -> Iterator[inspect.Parameter]:
    panel = ""
    for field in msgspec.structs.fields(Config):
        panel = PANEL_FIRST_FIELDS.get(field.name, panel)
        if field.name in PER_NODE_FIELDS:
            continue
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            info = typer.Option(
                f"{flag}/--no-{flag[2:]}", help=_help_text(field.name, ""), rich_help_panel=panel
            )
            yield _keyword_parameter(field.name, bool, info)
            continue
        metavar = "|".join(get_field_choices(field.name)) or {int: "N", float: "X"}.get(
            type(field.default), "TEXT"
        )
        text = _help_text(field.name, field.default)
        yield _keyword_parameter(
            field.name, str, typer.Option(flag, metavar=metavar, help=text, rich_help_panel=panel)
        )


def _help_text(field: str, default: object) -> str:
    text = get_field_help(field)
    return f"{text} (default {default})".strip() if default != "" else text
