"""The child processes that `baton up` starts, each with its environment. Pure.

Settings travel in the environment only. Secrets never stand on a command line, and a child reads
its settings as a process that was started by hand does.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from baton.cli.supervisor.gpus import make_node_environs
from baton.cli.supervisor.ports import Endpoints
from baton.config.settings import (
    ENV_PREFIX,
    FIELD_NAMES,
    NON_SETTING_VARIABLES,
    SECRET_FIELDS,
    Config,
)
from baton.errors import ConfigError
from baton.network.bind_policy import check_coordinator_binds
from baton.types import Role, mint_id

COORDINATOR = "coordinator"
POOL_NAME = "pool-0"
_ROLE_MODULES = {Role.PREFILL: "prefill_node", Role.DECODE: "decode_node"}
# Secrets that nodes and pools get. The coordinator serves every port, so it gets all of them.
_NODE_SECRETS = frozenset({"cluster_token"})
# Variables that libraries read, unless the user has set them.
_LIBRARY_DEFAULTS = {
    "OMP_WAIT_POLICY": "passive",  # a spinning thread would take the core of another process
    "GRPC_VERBOSITY": "ERROR",  # otherwise gRPC writes a line for each failed handshake
    # uvloop forks to start a process. gRPC would warn, although the fork only calls exec.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One child process: how to start it."""

    name: str
    module: str  # what `python -m` runs
    environ: Mapping[str, str]  # the whole environment
    is_optional: bool = False  # whether the cluster can run without it


def complete_config(config: Config) -> tuple[Config, list[str]]:
    """Fill in the settings that `baton up` decides; also return notices for the user.

    Without prefill nodes the mode becomes colocated, and a missing cluster token is minted. Raises
    ConfigError for a port that other hosts can reach without a key.
    """
    mode = config.mode
    notices = []
    if config.prefill == 0 and mode != "colocated":
        notices.append(f"--prefill 0: mode {mode} becomes colocated")
        mode = "colocated"
    token = config.cluster_token or mint_id(256)
    completed = dataclasses.replace(config, mode=mode, cluster_token=token)
    check_coordinator_binds(completed)
    return completed, notices


def check_threads(threads: str) -> None:
    """Raise ConfigError unless `threads` is auto or a positive number."""
    if threads != "auto" and (not threads.isdecimal() or int(threads) < 1):
        raise ConfigError(
            f"threads is {threads!r}: it must be auto or a number from 1", param="threads"
        )


def make_child_specs(
    config: Config, endpoints: Endpoints, *, environ: Mapping[str, str], cores: int, supervisor: int
) -> tuple[ChildSpec, ...]:
    """Return the specs of the coordinator, of the pool if there is one, and of the nodes.

    `config` is complete and has real ports. Children end when the process `supervisor` (a pid)
    does.
    """
    roles = [
        (role, index) for role, count in _role_counts(config).items() for index in range(count)
    ]
    check_threads(config.threads)
    threads = str(max(1, cores // len(roles))) if config.threads == "auto" else config.threads
    child_environ = (
        _inherited_environ(environ)
        | _settings_environ(config)
        | {"BATON_SUPERVISOR_PID": str(supervisor)}
    )
    child_environ |= {name: environ.get(name, value) for name, value in _LIBRARY_DEFAULTS.items()}
    coordinator_environ = child_environ | {"OMP_NUM_THREADS": "1"}
    child_environ = {
        key: value
        for key, value in child_environ.items()
        if key not in map(_variable_name, SECRET_FIELDS - _NODE_SECRETS)
    }
    node_environ = child_environ | {
        "BATON_COORDINATOR": endpoints.cluster,
        "BATON_POOL": endpoints.pool,
        "BATON_NODES_PER_HOST": str(len(roles)),
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", threads),
    }
    gpu_environs = make_node_environs(config, environ)
    nodes = (
        ChildSpec(name, _ROLE_MODULES[role], node_environ | gpu_environs[name])
        for role, name in _named_roles(roles)
    )
    return (
        ChildSpec(COORDINATOR, COORDINATOR, coordinator_environ),
        *_pool_specs(child_environ, endpoints),
        *nodes,
    )


def _pool_specs(base: Mapping[str, str], endpoints: Endpoints) -> tuple[ChildSpec, ...]:
    if not endpoints.pool:
        return ()
    pool_environ = {
        "BATON_NAME": POOL_NAME,
        "BATON_COORDINATOR": endpoints.cluster,
        "BATON_LISTEN": endpoints.pool,
        "OMP_NUM_THREADS": "1",
    }
    return (ChildSpec(POOL_NAME, "kv_pool", {**base, **pool_environ}, is_optional=True),)


def _role_counts(config: Config) -> dict[Role, int]:
    return {Role.PREFILL: config.prefill, Role.DECODE: config.decode}


def _named_roles(roles: list[tuple[Role, int]]) -> list[tuple[Role, str]]:
    return [(role, f"{role.value}-{index}") for role, index in roles]


def _inherited_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the user's environment without BATON_ settings.

    Settings have been resolved and are passed on. Unknown variables have been reported to the user.
    """
    passed = NON_SETTING_VARIABLES - {"BATON_CONFIG"}
    return {
        key: value
        for key, value in environ.items()
        if not key.startswith(ENV_PREFIX) or key in passed
    }


def _settings_environ(config: Config) -> dict[str, str]:
    values = {field: getattr(config, field) for field in FIELD_NAMES}
    return {
        _variable_name(field): str(value).lower() if isinstance(value, bool) else str(value)
        for field, value in values.items()
    }


def _variable_name(field: str) -> str:
    return "BATON_" + field.upper()
