"""The prefill role over a node's parts, with its transfer plane."""

from kv_transfer.factory import outbound_plane
from node_engine.role import NodeParts, RolePolicy
from prefill_node.role import PrefillRole


def make_prefill(parts: NodeParts) -> RolePolicy:
    """Raises ConfigError when the plane cannot be had."""
    return PrefillRole(parts, outbound_plane(parts))
