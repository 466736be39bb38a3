"""`python -m decode_node`: a memory-bound node. Its life is told in role.py."""

import sys

from baton.types import Role
from decode_node.role import DecodeRole
from kv_transfer.factory import inbound_plane
from node_engine.host.launch import launch
from node_engine.role import NodeParts, RolePolicy


def make_role(parts: NodeParts) -> RolePolicy:
    return DecodeRole(parts, inbound_plane(parts))


if __name__ == "__main__":
    sys.exit(launch(Role.DECODE, make_role))
