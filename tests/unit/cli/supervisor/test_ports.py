import socket

import pytest

from baton.cli.supervisor.ports import cluster_endpoints, reserve_port, reserve_ports
from baton.config.settings import Config
from baton.errors import ConfigError

ANY_PORTS = Config(port=0, grpc_port=0, admin_port=0, cluster_port=0)


def listener(port: int) -> socket.socket:
    """As the coordinator binds."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen()
    return listening


def test_coordinator_can_listen_on_a_reserved_port_repeatedly() -> None:
    config, held = reserve_ports(ANY_PORTS)
    for _ in range(2):
        with listener(config.port), socket.create_connection(("127.0.0.1", config.port)):
            pass
    for reserved in held:
        reserved.close()


def test_reserved_port_cannot_be_bound_by_others() -> None:
    config, held = reserve_ports(ANY_PORTS)
    taken = {config.port, config.grpc_port, config.admin_port, config.cluster_port}
    assert len(taken) == 4
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", config.port))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", config.port))
    for reserved in held:
        reserved.close()


def test_a_port_in_use_is_named_with_its_flag_and_nothing_stays_held() -> None:
    with listener(0) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(ConfigError, match=r"in use.*--admin-port") as error:
            reserve_ports(Config(port=0, grpc_port=0, admin_port=port, cluster_port=0))
    assert f"127.0.0.1:{port}" in error.value.message


def test_foreign_address_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"203\.0\.113\.1:0.*--port"):
        reserve_port("203.0.113.1", 0, "--port")


def test_a_wildcard_is_dialled_at_loopback() -> None:
    where = cluster_endpoints(
        Config(host="0.0.0.0", port=1, grpc_port=2, admin_host="::1", admin_port=3)
    )
    assert (where.http, where.grpc, where.admin) == ("127.0.0.1:1", "127.0.0.1:2", "[::1]:3")
