"""Starts a node process from the command line; used by both `python -m` launchers."""

from collections.abc import Mapping, Sequence

from baton.config import flags as config_flags
from baton.config.node_config import NodeConfig
from baton.models.model_source import with_local_model
from baton.process.entry import run_process
from baton.types import Role
from node_engine.host.node_process import run_node
from node_engine.host.role_switch import RoleFactory
from node_engine.shared_pool.pool_client import PoolClientFactory


def launch_node(
    role: Role,
    role_factories: Mapping[Role, RoleFactory],
    make_pool_client: PoolClientFactory | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Run a node that starts in `role` until it is stopped; returns the exit code."""

    def settings() -> NodeConfig:
        prog, description = f"python -m {role.value}_node", f"A {role.value} node of Baton."
        return with_local_model(
            config_flags.load_config(argv, NodeConfig, prog=prog, description=description)
        )

    return run_process(
        settings,
        lambda config, stop: run_node(config, role, role_factories, stop, make_pool_client),
    )
