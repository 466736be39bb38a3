"""Shares of the descriptors of a process, and who has to go when a port has too many connections."""

import pytest

from baton.config import Config
from baton.connection_limits import COORDINATOR_PORTS, Connection, PortLimit, connections_to_close, port_limit
from baton.errors import ConfigError
from coordinator.ports import Ports

LOCAL, ELSEWHERE = "127.0.0.1", "192.0.2.7"
PROCESSES = {"coordinator": COORDINATOR_PORTS, "node": ("transfer", "health"), "pool": ("pool", "transfer", "health")}


def connection(number: int, *, silent: bool = True, address: str = LOCAL, since: float | None = None) -> Connection:
    return Connection(number, address, 1000 + number, silent, float(number) if since is None else since)


@pytest.mark.parametrize("names", PROCESSES.values(), ids=PROCESSES)
@pytest.mark.parametrize("descriptors", [256, 1024, 4096, 20_000, 1 << 20])
def test_all_ports_together_leave_a_reserve(names: tuple[str, ...], descriptors: int) -> None:
    limits = [port_limit(name, descriptors) for name in names]
    assert sum(limit.ceiling for limit in limits) <= descriptors - 48
    assert min(limit.most for limit in limits) >= 16


def test_what_is_configured_is_granted_or_refused() -> None:
    limits = Ports(Config(max_connections=50, max_connections_per_address=5), 1024).limits
    assert limits["http"] == limits["grpc"] == PortLimit(50, 5)
    assert limits["cluster"].most > 50
    assert limits["cluster"].per_address == 5
    with pytest.raises(
        ConfigError, match=r"max_connections is 5000: a limit of 1024 open files leaves \d+ .*ulimit -n"
    ):
        Ports(Config(max_connections=5000), 1024)


def test_within_the_limit_nobody_goes() -> None:
    held = [connection(number) for number in range(8)]
    assert connections_to_close(held, PortLimit(8, 2)) == []


def test_the_oldest_silent_go_first_and_then_the_newest() -> None:
    held = [connection(number, silent=number % 2 == 0) for number in range(8)]
    closed = connections_to_close(held, PortLimit(2, 2))
    assert [one.descriptor for one in closed] == [0, 2, 4, 6, 7, 5]


def test_one_address_may_not_fill_a_port_but_loopback_may() -> None:
    held = [connection(number, address=ELSEWHERE) for number in range(6)] + [connection(9, address="192.0.2.8")]
    assert [one.descriptor for one in connections_to_close(held, PortLimit(100, 4))] == [0, 1]
    assert connections_to_close([connection(number) for number in range(6)], PortLimit(100, 4)) == []
