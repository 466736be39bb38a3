"""Opens what an LLM or a batch sends its requests to: a cluster, or an engine in this process."""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from baton.config.common import MemberConfig
from baton.config.coordinator_config import CoordinatorConfig
from baton.config.node_config import NodeConfig
from baton.config.resolve import resolve_config, select_settings
from baton.errors import ConfigError
from baton.process import log
from offline.endpoint import Endpoint
from offline.event_loop_thread import EventLoopThread

_IN_PROCESS_URL = "http://in-process"
# Of a node's settings, those that mean something only in a cluster.
_CLUSTER_SETTINGS = (
    {each.name for each in dataclasses.fields(MemberConfig)}
    - {"segment_dir", "log_level", "log_format"}
) | {"pool", "pool_patience", "pool_publish_rate", "nodes_per_gpu", "nodes_per_host"}


# Of a coordinator's settings, those that say how requests are read and answered.
_REQUEST_SETTINGS = ("tool_call_parser", "reasoning_parser")


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """How requests are sent; see `Endpoint`."""

    api_key: str = ""
    max_in_flight: int = 256
    answer_seconds: float = 3600.0
    retry_seconds: float = 120.0


DEFAULT_OPTIONS = EndpointOptions()


def is_url(model: str) -> bool:
    return model.startswith(("http://", "https://"))


def open_endpoint(
    thread: EventLoopThread, model: str, options: EndpointOptions, settings: Mapping[str, object]
) -> Endpoint:
    """Open an endpoint that is used on `thread`, and closed there.

    `settings` are those of the engine, by name. Raises ConfigError, EndpointUnavailable, and what
    a cluster refuses the caller with.
    """
    _check_options(options)
    if is_url(model):
        if settings:
            raise ConfigError(
                f"{next(iter(settings))} is a setting of an engine in this process: leave it out"
                f" for the cluster at {model}"
            )
        return thread.call(_open_cluster(model, options))
    return _open_engine(thread, model, options, settings)


@contextmanager
def opened_endpoint(
    thread: EventLoopThread, model: str, options: EndpointOptions, settings: Mapping[str, object]
) -> Iterator[Endpoint]:
    """`open_endpoint` for a block, at whose end the endpoint is closed."""
    endpoint = open_endpoint(thread, model, options, settings)
    try:
        yield endpoint
    finally:
        thread.call(endpoint.close())


async def _open_cluster(url: str, options: EndpointOptions) -> Endpoint:
    endpoint = Endpoint(url, **dataclasses.asdict(options))
    try:
        await endpoint.check()
    except BaseException:
        await endpoint.close()
        raise
    return endpoint


def _open_engine(
    thread: EventLoopThread, model: str, options: EndpointOptions, settings: Mapping[str, object]
) -> Endpoint:
    config, requests = resolve_engine_settings(model, settings)
    if not structlog.is_configured():  # else the program has logging of its own
        log.configure_logging(config.log_level, config.log_format)
    from offline.in_process.assemble import load_engine, start_server  # imports torch

    loaded = load_engine(config)

    async def start() -> Endpoint:
        return Endpoint(
            _IN_PROCESS_URL,
            transport=await start_server(loaded, requests),
            **dataclasses.asdict(options),
        )

    try:
        return thread.call(start())
    except BaseException:
        loaded.close()
        raise


def list_engine_settings() -> list[str]:
    """Return the names of the settings of an engine in this process, and `model`."""
    names = [each.name for each in dataclasses.fields(NodeConfig)]
    return [name for name in names if name not in _CLUSTER_SETTINGS] + list(_REQUEST_SETTINGS)


def resolve_engine_settings(
    model: str, settings: Mapping[str, object]
) -> tuple[NodeConfig, CoordinatorConfig]:
    """Return the settings of an engine, and of how its requests are handled.

    They come from `settings`, then from BATON_* variables. Of a coordinator only those that
    `list_engine_settings` names are used. Raises ConfigError.
    """
    known = list_engine_settings()
    for name in settings:
        if name not in known:
            alike = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {alike[0]}?" if alike else "docs/architecture.md lists them"
            raise ConfigError(f"there is no setting {name!r} of an engine: {hint}", param=name)
    given = {"log_level": "warning", **settings, "model": model}
    config = resolve_config(given, source="argument")
    node = dataclasses.replace(select_settings(config, NodeConfig), pool="")
    return node, select_settings(config, CoordinatorConfig)


def _check_options(options: EndpointOptions) -> None:
    if not 1 <= options.max_in_flight <= 65536:
        raise ConfigError(
            f"max_in_flight is {options.max_in_flight}: it must be 1 to 65536",
            param="max_in_flight",
        )
    for name, value in (
        ("timeout", options.answer_seconds),
        ("retry_timeout", options.retry_seconds),
    ):
        if not 0 < value <= 1e6:
            raise ConfigError(
                f"{name} is {value}: it must be above 0 and at most 1000000 seconds", param=name
            )
