"""Binding a gRPC server to a port."""

import grpc
import grpc.aio

from baton.errors import ConfigError


def bind_grpc_port(
    server: grpc.aio.Server,
    host: str,
    port: int,
    flag: str,
    credentials: grpc.ServerCredentials | None = None,
) -> int:
    """Bind a port of the server and return its number; port 0 picks a free one.

    Without `credentials` the port is plain text. Raises ConfigError, which names `flag`.
    """
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return int(
            server.add_secure_port(target, credentials)
            if credentials
            else server.add_insecure_port(target)
        )
    except RuntimeError:
        raise ConfigError(f"cannot listen on {target}: choose another {flag}, 0 for any") from None
