"""Bounds of Baton's gRPC channels and servers: messages, connections, handshakes and streams."""

from typing import Any

from baton.limits import MAX_LINK_MESSAGE_BYTES
from baton.network.connection_limits import PortLimit

HANDSHAKE_TIMEOUT_SECONDS = 10.0  # for TLS, if any, and the first HTTP/2 frames
_IDLE_SECONDS = 300.0  # without a call; the client dials again for its next call
# Of channels and servers between processes of Baton.
LINK_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_LINK_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_LINK_MESSAGE_BYTES),
)


def grpc_server_options(
    limit: PortLimit, *, streams: int, idle: float = _IDLE_SECONDS
) -> tuple[tuple[str, Any], ...]:
    """Return channel arguments for a server.

    `streams` bounds concurrent streams of a connection. `idle` is in seconds.
    """
    return (
        # A second process on the port is an error. It must not get a share of the connections.
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", limit.max_accepted),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_TIMEOUT_SECONDS * 1e3)),
        ("grpc.max_connection_idle_ms", int(idle * 1e3)),
        ("grpc.max_concurrent_streams", streams),
    )
