"""Command-line options, generated from the fields of Config or shared by several commands."""

import dataclasses
import inspect
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import typer

from baton.config import flags as config_flags
from baton.config.resolve import get_field_choices, get_field_help, resolve_config
from baton.config.settings import FIELD_NAMES, Config

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

# The panels of `up --help`, each with its settings.
PANELS: dict[str, tuple[str, ...]] = {
    "The model": (
        "model",
        "served_model_name",
        "engine",
        "load_format",
        "device",
        "dtype",
        "quantize",
        "kv_dtype",
        "deterministic",
        "cpu_kernels",
        "compact_weights",
        "threads",
        "grammar_timeout",
        "grammar_cache",
        "weight_cache_dir",
        "weight_cache_size",
    ),
    "The cluster": (
        "prefill",
        "decode",
        "gpus",
        "mode",
        "max_model_len",
        "kv_memory",
        "block_size",
        "max_num_seqs",
        "max_batched_tokens",
        "max_step_ms",
        "preemption",
        "speculative",
        "draft_model",
        "speculative_tokens",
        "local_prefill_share",
        "degrade_wait",
        "degraded_max_tokens",
        "request_timeout",
        "unknown_fields",
        "tool_call_parser",
        "reasoning_parser",
        "max_queue",
        "max_queue_tokens",
        "placement",
        "explain_keep",
        "slo",
        "ratio_auto",
    ),
    "Where things listen": (
        "host",
        "port",
        "grpc_port",
        "admin_host",
        "admin_port",
        "metrics_on_http",
        "cluster_host",
        "cluster_port",
        "max_connections",
        "max_connections_per_address",
        "state_dir",
    ),
    "Who may do what": (
        "api_key",
        "tenants",
        "cluster_token",
        "admin_token",
        "allowed_origins",
        "insecure",
        "core_dumps",
        "failpoints_rpc",
    ),
    "The transfer plane": (
        "segment_dir",
        "transport",
        "layers_per_message",
    ),
    "The shared pool": (
        "pool",
        "pool_memory",
        "pool_disk",
        "pool_disk_dir",
        "pool_port",
        "pool_eviction",
        "pool_patience",
        "pool_publish_rate",
    ),
    "Time-outs and retries": (
        "heartbeat",
        "silence",
        "stall",
        "ticket_ttl",
        "progress_timeout",
        "max_attempts",
        "retry_budget",
        "drain_timeout",
        "liveness_timeout",
        "flip_timeout",
    ),
    "The paced engine": (
        "paced_prefill_us_per_token",
        "paced_step_ms",
        "paced_sequence_us",
        "paced_vocab_size",
        "paced_reread",
    ),
    "Logs": (
        "log_level",
        "log_format",
        "log_max_bytes",
        "log_backups",
    ),
}
# A node's own settings, which `up` decides for each node.
PER_NODE_FIELDS = frozenset(
    {
        "coordinator",
        "name",
        "listen",
        "advertise",
        "health_port",
        "host_id",
        "nodes_per_gpu",
        "nodes_per_host",
    }
)
_METAVARS = {int: "N", float: "X"}
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Config)}


def add_config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(settings: Config, **own)` an option for each setting, --config and --set.

    The wrapper resolves flag > environment > file > default. It raises ConfigError that names the
    field, the value and its source.
    """
    own_parameters = [
        p
        for p in inspect.signature(command, eval_str=True).parameters.values()
        if p.name != "settings"
    ]
    parameters = [*own_parameters, *_file_parameters(), *_field_parameters()]

    def wrapper(**values: Any) -> None:
        own_values = {parameter.name: values.pop(parameter.name) for parameter in own_parameters}
        command(settings=_resolve_options(values), **own_values)

    wrapper.__doc__ = command.__doc__
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def _resolve_options(values: Mapping[str, Any]) -> Config:
    typed = {
        key: value for key, value in values.items() if value is not None and key in FIELD_NAMES
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
    for panel, names in PANELS.items():
        for name in names:
            yield _field_parameter(name, _DEFAULTS[name], panel)


def _field_parameter(name: str, default: object, panel: str) -> inspect.Parameter:
    flag = "--" + name.replace("_", "-")
    if isinstance(default, bool):
        text = _help_text(name, "")
        info = typer.Option(f"{flag}/--no-{flag[2:]}", help=text, rich_help_panel=panel)
        return _keyword_parameter(name, bool, info)
    metavar = "|".join(get_field_choices(name)) or _METAVARS.get(type(default), "TEXT")
    text = _help_text(name, default)
    info = typer.Option(flag, metavar=metavar, help=text, rich_help_panel=panel)
    return _keyword_parameter(name, str, info)


def _help_text(field: str, default: object) -> str:
    text = get_field_help(field)
    return f"{text} (default {default})".strip() if default != "" else text
