"""Ports that belong to the cluster from before its first process starts until after its last one
ended.

The supervisor binds every port without listening on it. So a port in use is an error before
anything starts, "0" is resolved once, nobody takes a port while the coordinator is being restarted,
and nodes can be started with the coordinator's address before it listens. Linux lets the
coordinator bind the same port, because both sockets set SO_REUSEADDR and only one of them listens.
"""

import errno
import socket
from dataclasses import dataclass

import msgspec

from baton.config.settings import Config
from baton.errors import ConfigError

_WILDCARD_LOOPBACKS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
PORT_FIELDS = {
    "port": "host",
    "grpc_port": "host",
    "admin_port": "admin_host",
    "cluster_port": "cluster_host",
}
_LOOPBACK = "127.0.0.1"  # where a pool listens: its nodes are on its host


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where this machine's processes reach the cluster, each HOST:PORT."""

    http: str
    grpc: str
    admin: str
    cluster: str
    pool: str = ""  # if there is one


def reserve_ports(config: Config) -> tuple[Config, list[socket.socket]]:
    """`config` with real port numbers, and the sockets that hold them. Raises ConfigError for a
    port in use."""
    held: dict[str, socket.socket] = {}
    try:
        for field, host_field in PORT_FIELDS.items():
            held[field] = reserve_port(
                getattr(config, host_field), getattr(config, field), "--" + field.replace("_", "-")
            )
        if config.has_pool:
            held["pool_port"] = reserve_port(_LOOPBACK, config.pool_port, "--pool-port")
    except ConfigError:
        for one in held.values():
            one.close()
        raise
    ports = {field: one.getsockname()[1] for field, one in held.items()}
    return msgspec.structs.replace(config, **ports), list(held.values())


def reserve_port(host: str, port: int, flag: str) -> socket.socket:
    """Bind without listening. Raises ConfigError naming the address and the flag that changes
    it."""
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, port))
    except OSError as error:
        held.close()
        reason = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {host}:{port} ({reason}): choose another {flag}, 0 for any"
        ) from None
    return held


def cluster_endpoints(config: Config) -> Endpoints:
    """Of a configuration with real port numbers. A wildcard host is dialled at its loopback
    address."""
    return Endpoints(
        http=dial_address(config.host, config.port),
        grpc=dial_address(config.host, config.grpc_port),
        admin=dial_address(config.admin_host, config.admin_port),
        cluster=dial_address(config.cluster_host, config.cluster_port),
        pool=dial_address(_LOOPBACK, config.pool_port) if config.has_pool else "",
    )


def dial_address(host: str, port: int) -> str:
    """Where this machine dials what listens on `host`."""
    host = _WILDCARD_LOOPBACKS.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
