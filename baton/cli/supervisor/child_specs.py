"""What `up` starts: pure. Settings in, child processes with their environments out.

Settings travel in the environment only: secrets never stand on a command line, and a child reads
the same table as a process that was started by hand.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from baton.cli.supervisor.ports import Endpoints
from baton.config.settings import ENV_PREFIX, NON_SETTING_VARIABLES, SECRET_FIELDS, Config
from baton.errors import ConfigError
from baton.network.bind_policy import check_coordinator_binds
from baton.types import Role, mint_id

COORDINATOR = "coordinator"
POOL_NAME = "pool-0"
_ROLE_MODULES = {Role.PREFILL: "prefill_node", Role.DECODE: "decode_node"}
_NODE_SECRETS = frozenset(
    {"cluster_token"}
)  # and of pools; the coordinator has every door, so every key


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One child: its name, the module that `python -m` runs, and its whole environment."""

    name: str
    module: str
    environ: Mapping[str, str]
    is_optional: bool = False  # the cluster goes on without it when it cannot start


def complete_config(config: Config) -> tuple[Config, list[str]]:
    """Fill in what `up` decides: the mode without prefill nodes, a token. Also returns what to tell
    the user. Raises ConfigError for a port that is open to others without its key."""
    changed: dict[str, object] = {}
    notes = []
    if config.prefill == 0 and config.mode != "colocated":
        changed["mode"] = "colocated"
        notes.append(f"--prefill 0: mode {config.mode} becomes colocated")
    if not config.cluster_token:
        changed["cluster_token"] = mint_id(256)
    completed = msgspec.structs.replace(config, **changed)
    check_coordinator_binds(completed)
    return completed, notes


def threads_per_node(threads: str, nodes: int, cores: int) -> int:
    """Compute threads of each node. `auto` shares the cores out: two nodes with as many threads as
    cores each would slow each other down several times over. Raises ConfigError unless `threads` is
    auto or a positive number."""
    if threads == "auto":
        return max(1, cores // nodes)
    if not threads.isdecimal() or int(threads) < 1:
        raise ConfigError(
            f"threads is {threads!r}: it must be auto or a number from 1", param="threads"
        )
    return int(threads)


def make_child_specs(
    config: Config, where: Endpoints, *, environ: Mapping[str, str], cores: int, supervisor: int
) -> tuple[ChildSpec, ...]:
    """The coordinator, the pool if there is one, then the nodes. `config` is complete and has real
    ports; `supervisor` is the pid to die with."""
    roles = [
        (role, index) for role, count in _role_counts(config).items() for index in range(count)
    ]
    threads = str(threads_per_node(config.threads, len(roles), cores))
    base = (
        _inherited_environ(environ)
        | _settings_environ(config)
        | {"BATON_SUPERVISOR_PID": str(supervisor)}
    )
    base["OMP_WAIT_POLICY"] = environ.get(
        "OMP_WAIT_POLICY", "passive"
    )  # a spinning thread takes a neighbour's core
    base["GRPC_VERBOSITY"] = environ.get(
        "GRPC_VERBOSITY", "ERROR"
    )  # else it writes a line for each failed handshake
    front = base | {"OMP_NUM_THREADS": "1"}
    base = {
        key: value
        for key, value in base.items()
        if key not in map(_variable_name, SECRET_FIELDS - _NODE_SECRETS)
    }
    node = base | {
        "BATON_THREADS": threads,
        "BATON_COORDINATOR": where.cluster,
        "BATON_POOL": where.pool,
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", threads),
    }
    nodes = (
        ChildSpec(name, _ROLE_MODULES[role], node | {"BATON_NAME": name})
        for role, name in _named_roles(roles)
    )
    return (ChildSpec(COORDINATOR, COORDINATOR, front), *_pool_specs(base, where), *nodes)


def _pool_specs(base: Mapping[str, str], where: Endpoints) -> tuple[ChildSpec, ...]:
    if not where.pool:
        return ()
    own = {
        "BATON_NAME": POOL_NAME,
        "BATON_COORDINATOR": where.cluster,
        "BATON_LISTEN": where.pool,
        "OMP_NUM_THREADS": "1",
    }
    return (ChildSpec(POOL_NAME, "kv_pool", {**base, **own}, is_optional=True),)


def _role_counts(config: Config) -> dict[Role, int]:
    return {Role.PREFILL: config.prefill, Role.DECODE: config.decode}


def _named_roles(roles: list[tuple[Role, int]]) -> list[tuple[Role, str]]:
    return [(role, f"{role.value}-{index}") for role, index in roles]


def _inherited_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The user's environment without settings, which were resolved once and are passed on, and
    without what looks like one: who started `up` has been told of it."""
    passed = NON_SETTING_VARIABLES - {"BATON_CONFIG"}
    return {
        key: value
        for key, value in environ.items()
        if not key.startswith(ENV_PREFIX) or key in passed
    }


def _settings_environ(config: Config) -> dict[str, str]:
    values = {field: getattr(config, field) for field in Config.__struct_fields__}
    return {
        _variable_name(field): str(value).lower() if isinstance(value, bool) else str(value)
        for field, value in values.items()
    }


def _variable_name(field: str) -> str:
    return "BATON_" + field.upper()
