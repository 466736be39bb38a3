"""The decode role over a node's parts, with its transfer plane."""

from decode_node.role import DecodeRole
from kv_transfer.factory import inbound_plane
from node_engine.role import NodeParts, RolePolicy


def make_decode(parts: NodeParts) -> RolePolicy:
    """Raises ConfigError when the plane cannot be had."""
    return DecodeRole(parts, inbound_plane(parts))
