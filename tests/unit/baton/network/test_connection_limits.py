"""Shares of the descriptors of a process, and who has to go when a port has too many
connections."""

import pytest

from baton.config.settings import Config
from baton.errors import ConfigError
from baton.network.connection_limits import (
    COORDINATOR_PORTS,
    PortConnection,
    PortLimit,
    choose_connections_to_close,
    compute_port_limit,
)
from coordinator.operators.port_connections import PortConnections

LOCAL, ELSEWHERE = "127.0.0.1", "192.0.2.7"
PROCESSES = {
    "coordinator": COORDINATOR_PORTS,
    "node": ("transfer", "health"),
    "pool": ("pool", "transfer", "health"),
}


def connection(
    number: int, *, silent: bool = True, address: str = LOCAL, since: float | None = None
) -> PortConnection:
    return PortConnection(
        number, address, 1000 + number, silent, float(number) if since is None else since
    )


@pytest.mark.parametrize("names", PROCESSES.values(), ids=PROCESSES)
@pytest.mark.parametrize("descriptors", [256, 1024, 4096, 20_000, 1 << 20])
def test_all_ports_together_leave_a_reserve(names: tuple[str, ...], descriptors: int) -> None:
    limits = [compute_port_limit(name, descriptors) for name in names]
    assert sum(limit.max_accepted for limit in limits) <= descriptors - 48
    assert min(limit.max_connections for limit in limits) >= 16


def test_configured_limit_is_used_or_rejected() -> None:
    limits = PortConnections(Config(max_connections=50, max_connections_per_address=5), 1024).limits
    assert limits["http"] == limits["grpc"] == PortLimit(50, 5)
    assert limits["cluster"].max_connections > 50
    assert limits["cluster"].max_per_address == 5
    with pytest.raises(
        ConfigError,
        match=r"max_connections is 5000: a limit of 1024 open files leaves \d+ .*ulimit -n",
    ):
        PortConnections(Config(max_connections=5000), 1024)


def test_no_connection_is_closed_within_the_limit() -> None:
    held = [connection(number) for number in range(8)]
    assert choose_connections_to_close(held, PortLimit(8, 2)) == []


def test_oldest_silent_connections_close_first_then_newest() -> None:
    held = [connection(number, silent=number % 2 == 0) for number in range(8)]
    closed = choose_connections_to_close(held, PortLimit(2, 2))
    assert [connection.descriptor for connection in closed] == [0, 2, 4, 6, 7, 5]


def test_per_address_limit_exempts_loopback() -> None:
    connections = [connection(number, address=ELSEWHERE) for number in range(6)] + [
        connection(9, address="192.0.2.8")
    ]
    assert [
        connection.descriptor
        for connection in choose_connections_to_close(connections, PortLimit(100, 4))
    ] == [
        0,
        1,
    ]
    assert (
        choose_connections_to_close([connection(number) for number in range(6)], PortLimit(100, 4))
        == []
    )
