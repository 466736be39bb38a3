"""Starts a node process from the command line; used by both `python -m` launchers."""

from collections.abc import Mapping, Sequence

from baton.config import flags as config_flags
from baton.config.settings import Config
from baton.models.model_source import with_local_model
from baton.process.entry import run_process
from baton.types import Role
from node_engine.host.node_process import run_node
from node_engine.host.role_switch import RoleFactory
from node_engine.shared_pool.pool_client import PoolClientFactory

NODE_CONFIG_FIELDS = (
    *(
        "coordinator",
        "cluster_token",
        "insecure",
        "name",
        "listen",
        "advertise",
        "health_port",
        "host_id",
        "pool",
    ),
    *(
        "model",
        "engine",
        "load_format",
        "device",
        "dtype",
        "threads",
        "max_model_len",
        "kv_memory",
        "block_size",
    ),
    *(
        "max_num_seqs",
        "max_batched_tokens",
        "preemption",
        "transport",
        "layers_per_message",
        "segment_dir",
        "silence",
    ),
    *("ticket_ttl", "pool_patience", "pool_publish_rate"),
    *(
        "progress_timeout",
        "drain_timeout",
        "paced_prefill_us_per_token",
        "paced_step_ms",
        "paced_vocab_size",
    ),
    *(
        "paced_sequence_us",
        "paced_reread",
        "log_level",
        "log_format",
        "max_connections_per_address",
        "core_dumps",
    ),
)


def launch_node(
    role: Role,
    role_factories: Mapping[Role, RoleFactory],
    make_pool_client: PoolClientFactory | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Run a node that starts in `role` until it is stopped; returns the exit code."""

    def settings() -> Config:
        prog, description = f"python -m {role.value}_node", f"A {role.value} node of Baton."
        return with_local_model(
            config_flags.load_config(
                argv, prog=prog, description=description, fields=NODE_CONFIG_FIELDS
            )
        )

    return run_process(
        settings,
        lambda config, stop: run_node(config, role, role_factories, stop, make_pool_client),
    )
