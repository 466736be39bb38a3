"""Ports that the supervisor reserves for as long as the cluster runs.

The supervisor binds every port without listening on it. So a port in use is an error before
anything starts, port 0 is resolved once, no other process can take a port while the coordinator
restarts, and nodes can start with the coordinator's address before it listens. Linux lets the
coordinator bind the same port, because both sockets set SO_REUSEADDR and only one of them listens.
"""

import dataclasses
import errno
import socket
from dataclasses import dataclass

from baton.config.settings import Config
from baton.errors import ConfigError

_WILDCARD_LOOPBACKS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
PORT_FIELDS = {
    "port": "host",
    "grpc_port": "host",
    "admin_port": "admin_host",
    "cluster_port": "cluster_host",
}
_LOOPBACK = "127.0.0.1"  # a pool listens here, since its nodes are on the same host


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The addresses at which processes of this machine reach the cluster, each HOST:PORT."""

    http: str
    grpc: str
    admin: str
    cluster: str
    pool: str = ""  # empty: no pool


def reserve_ports(config: Config) -> tuple[Config, list[socket.socket]]:
    """Return `config` with real port numbers, and the sockets that reserve them.

    Raises ConfigError for a port in use.
    """
    sockets: dict[str, socket.socket] = {}
    try:
        for field, host_field in PORT_FIELDS.items():
            sockets[field] = reserve_port(
                getattr(config, host_field), getattr(config, field), "--" + field.replace("_", "-")
            )
        if config.has_pool:
            sockets["pool_port"] = reserve_port(_LOOPBACK, config.pool_port, "--pool-port")
    except ConfigError:
        for reserved in sockets.values():
            reserved.close()
        raise
    ports = {field: reserved.getsockname()[1] for field, reserved in sockets.items()}
    return dataclasses.replace(config, **ports), list(sockets.values())


def reserve_port(host: str, port: int, flag: str) -> socket.socket:
    """Return a socket that is bound and does not listen.

    Raises ConfigError that names the address and the flag that changes it.
    """
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind((host, port))
    except OSError as error:
        reserved.close()
        reason = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {host}:{port} ({reason}): choose another {flag}, 0 for any"
        ) from None
    return reserved


def cluster_endpoints(config: Config) -> Endpoints:
    """Return the endpoints of a configuration with real port numbers.

    A wildcard host is dialled at its loopback address.
    """
    return Endpoints(
        http=dial_address(config.host, config.port),
        grpc=dial_address(config.host, config.grpc_port),
        admin=dial_address(config.admin_host, config.admin_port),
        cluster=dial_address(config.cluster_host, config.cluster_port),
        pool=dial_address(_LOOPBACK, config.pool_port) if config.has_pool else "",
    )


def dial_address(host: str, port: int) -> str:
    """Return the address at which this machine dials a server that listens on `host`."""
    host = _WILDCARD_LOOPBACKS.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
