"""`python -m prefill_node`: a compute-bound node. Its life is told in role.py."""

import sys

from baton.types import Role
from kv_transfer.factory import outbound_plane
from node_engine.host.launch import launch
from node_engine.role import NodeParts, RolePolicy
from prefill_node.role import PrefillRole


def make_role(parts: NodeParts) -> RolePolicy:
    return PrefillRole(parts, outbound_plane(parts))


if __name__ == "__main__":
    sys.exit(launch(Role.PREFILL, make_role))
