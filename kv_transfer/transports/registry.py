"""The transports by name: the one place that knows all of them.

A new transport, such as one over CUDA IPC, implements the links of kv_transfer/transports/links.py
and gets its line in both functions.
"""

from baton.network.bind_policy import get_endpoint_host, require_key_unless_loopback
from kv_transfer.common.settings import TransferSettings
from kv_transfer.transports.grpc_decode_link import GrpcDecodeLink
from kv_transfer.transports.grpc_protocol import SCHEME
from kv_transfer.transports.grpc_writer_link import GrpcDialer
from kv_transfer.transports.links import DecodeLink, TransferDialer
from kv_transfer.transports.memory_link import MemoryDecodeLink, MemoryDialer
from kv_transfer.transports.zmq_keys import derive_curve_keys
from kv_transfer.transports.zmq_link import ZmqDecodeLink, ZmqDialer


def make_decode_link(settings: TransferSettings, token: str) -> DecodeLink:
    """Make the link on which a decode node receives, of the transport in `settings`.

    Raises ConfigError when `settings.listen` is not allowed or cannot be bound.
    """
    if settings.transport == "memory":
        return MemoryDecodeLink()
    require_key_unless_loopback(
        "--listen",
        get_endpoint_host(settings.listen),
        "cluster_token",
        token,
        insecure=settings.insecure,
    )
    if settings.transport == "grpc":
        return GrpcDecodeLink(token, settings)
    return ZmqDecodeLink(derive_curve_keys(token), settings)


def make_dialers(token: str, settings: TransferSettings) -> dict[str, TransferDialer]:
    """Make what dials decode nodes, by the scheme of the endpoint that a ticket names."""
    return {
        "memory": MemoryDialer(),
        "tcp": ZmqDialer(derive_curve_keys(token), settings),
        SCHEME: GrpcDialer(token, settings),
    }
