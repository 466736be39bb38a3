"""Builds the prefill role with its transfer plane."""

from kv_transfer.device.device_memory import TransferDevice
from kv_transfer.factory import make_outbound_plane
from node_engine.roles.role_policy import RoleContext, RolePolicy
from prefill_node.prefill_role import PrefillRole


def make_prefill_role(context: RoleContext, device: TransferDevice | None = None) -> RolePolicy:
    """Raises ConfigError if the transfer plane cannot be built."""
    return PrefillRole(context, make_outbound_plane(context, device))
