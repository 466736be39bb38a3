"""The prefill role over a node's parts, with its transfer plane."""

from kv_transfer.factory import make_outbound_plane
from node_engine.roles.role_policy import RoleContext, RolePolicy
from prefill_node.prefill_role import PrefillRole


def make_prefill_role(parts: RoleContext) -> RolePolicy:
    """Raises ConfigError when the plane cannot be had."""
    return PrefillRole(parts, make_outbound_plane(parts))
