"""The decode role over a node's parts, with its transfer plane."""

from decode_node.decode_role import DecodeRole
from kv_transfer.factory import make_inbound_plane
from node_engine.roles.role_policy import RoleContext, RolePolicy


def make_decode_role(parts: RoleContext) -> RolePolicy:
    """Raises ConfigError when the plane cannot be had."""
    return DecodeRole(parts, make_inbound_plane(parts))
