"""Every setting, as `baton up` reads them.

Every field of `Config` is a flag `--field-name`, a variable `BATON_FIELD_NAME` and a TOML key
`field_name`; `baton.config.resolve` merges them, and gives a process those that its own class has.
A configuration is frozen: a value of "auto" is resolved and logged where it is used.
"""

import dataclasses
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from baton.config.common import (
    MAX_SECONDS,
    Port,
    PositiveInt,
    help_text,
)
from baton.config.coordinator_config import CoordinatorConfig
from baton.config.node_config import NodeConfig
from baton.config.pool_config import NO_POOL, PoolConfig

ALL_GPUS = "all"  # value of gpus


@dataclass(frozen=True, kw_only=True)
class Config(CoordinatorConfig, NodeConfig, PoolConfig):
    """Settings of a whole cluster: those of each process, and those of the supervisor."""

    decode: Annotated[PositiveInt, help_text("Decode nodes that `up` starts")] = 1
    gpus: Annotated[
        str,
        help_text(
            "GPUs over which `up` spreads its nodes: all, a number such as 2, or a list of indices "
            "such as 0,2 (one index: 3,); nodes may share a GPU"
        ),
    ] = ALL_GPUS
    pool_port: Annotated[
        Port, help_text("Port where `up` lets its nodes dial the pool; 0 picks a free one")
    ] = 0
    liveness_timeout: Annotated[
        float,
        # A process sends a liveness signal every second, and a busy machine delays some.
        Meta(ge=5, le=MAX_SECONDS),
        help_text(
            "Seconds without a sign of life after which `up` ends a process and starts it again; "
            "at least 5"
        ),
    ] = 30.0
    log_max_bytes: Annotated[
        int,
        Meta(ge=4096),
        help_text("Bytes after which `up --detach` begins a process's log file anew"),
    ] = 64 << 20
    log_backups: Annotated[
        int,
        Meta(ge=0, le=1000),
        help_text("Full log files that are kept for each process, beside the one in use"),
    ] = 3

    @property
    def has_pool(self) -> bool:
        """Whether `up` starts a pool."""
        return self.pool_memory.strip() != NO_POOL


FIELD_NAMES = tuple(field.name for field in dataclasses.fields(Config))
SECRET_FIELDS = frozenset({"api_key", "cluster_token", "admin_token"})
ENV_PREFIX = "BATON_"
# Variables that are not settings: for commands, for tests, and from a supervisor to its children.
NON_SETTING_VARIABLES = frozenset(
    {
        *(
            "BATON_CONFIG",
            "BATON_ENDPOINT",
            "BATON_URL",
            "BATON_FAILPOINTS",
            "BATON_FAILPOINTS_SEED",
        ),
        *("BATON_SUPERVISOR_PID", "BATON_LIVENESS_FD"),
    }
)
