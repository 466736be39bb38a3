"""What every gRPC server of ours bounds: connections, how long each may take to begin and be idle,
and its streams."""

from typing import Any

from baton.network.connection_limits import PortLimit

HANDSHAKE_TIMEOUT_SECONDS = 10.0  # that a connection has for TLS, if any, and HTTP/2's first frames
_IDLE_SECONDS = 300.0  # without a call; the client dials again by itself when it has one


def grpc_server_options(
    limit: PortLimit, *, streams: int, idle: float = _IDLE_SECONDS
) -> tuple[tuple[str, Any], ...]:
    """`streams` at a time on one connection."""
    return (
        (
            "grpc.so_reuseport",
            0,
        ),  # a second process on the port is an error, not a silent share of its callers
        ("grpc.max_allowed_incoming_connections", limit.max_accepted),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_TIMEOUT_SECONDS * 1e3)),
        ("grpc.max_connection_idle_ms", int(idle * 1e3)),
        ("grpc.max_concurrent_streams", streams),
    )
