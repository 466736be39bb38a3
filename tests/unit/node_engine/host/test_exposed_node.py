"""A node that others can reach needs the cluster token, whatever its role: its health port listens
there too."""

import asyncio

import pytest

from baton.config.settings import Config
from baton.errors import ConfigError
from baton.types import Role
from node_engine.host.assemble import run_node
from node_engine.roles.role_policy import RoleContext, RolePolicy


def fail_to_make_role(context: RoleContext) -> RolePolicy:
    raise AssertionError("too late")


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "node.example:7000"])
async def test_exposed_node_without_token_is_refused_before_loading(
    role: Role, listen: str
) -> None:
    config = Config(coordinator="127.0.0.1:1", listen=listen)
    with pytest.raises(ConfigError, match=r"set --cluster-token, .*or use --insecure"):
        await run_node(config, role, asyncio.Event(), {role: fail_to_make_role})
