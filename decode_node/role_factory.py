"""Builds the decode role with its transfer plane."""

from decode_node.decode_role import DecodeRole
from kv_transfer.device.device_memory import TransferDevice
from kv_transfer.factory import make_inbound_plane
from node_engine.roles.role_policy import RoleContext, RolePolicy


def make_decode_role(context: RoleContext, device: TransferDevice | None = None) -> RolePolicy:
    """Raises ConfigError if the transfer plane cannot be built."""
    return DecodeRole(context, make_inbound_plane(context, device))
