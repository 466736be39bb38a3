"""A node that others can reach needs the cluster token, whatever its role: its health port listens there too."""

import asyncio

import pytest

from baton.config import Config
from baton.errors import ConfigError
from baton.types import Role
from node_engine.host.process import host_node
from node_engine.role import NodeParts, RolePolicy


def no_role(parts: NodeParts) -> RolePolicy:
    raise AssertionError("too late")


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "node.example:7000"])
async def test_it_refuses_before_it_loads_anything(role: Role, listen: str) -> None:
    config = Config(coordinator="127.0.0.1:1", listen=listen)
    with pytest.raises(ConfigError, match=r"set --cluster-token, .*or say --insecure"):
        await host_node(config, role, {role: no_role}, asyncio.Event())
