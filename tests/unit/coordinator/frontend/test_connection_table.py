"""Which HTTP connection makes room for a new one."""

from baton.network.connection_limits import PortLimit
from coordinator.frontend.http.server.bounded_protocol import ConnectionTable


class StubConnection:
    def __init__(self) -> None:
        self.is_closed = False

    def abort_connection(self) -> None:
        self.is_closed = True


def add_connections(
    table: ConnectionTable, count: int, address: str = "127.0.0.1"
) -> list[StubConnection]:
    made = [StubConnection() for _ in range(count)]
    for one in made:
        table.add_connection(one, address)
    return made


def closed_indices(connections: list[StubConnection]) -> list[int]:
    return [number for number, one in enumerate(connections) if one.is_closed]


def test_longest_idle_connection_is_closed_first() -> None:
    table = ConnectionTable("http", PortLimit(4, 4))
    held = add_connections(table, 4)
    table.mark_busy(held[0])
    table.mark_busy(held[1])
    table.mark_idle(held[1])  # its answer has been sent: the last to be idle
    held += add_connections(table, 1)
    assert closed_indices(held) == [2]
    held += add_connections(table, 2)
    assert closed_indices(held) == [1, 2, 3]
    assert (len(table), table.refused_connections) == (4, 3)


def test_new_connection_is_refused_when_all_are_busy() -> None:
    table = ConnectionTable("http", PortLimit(3, 3))
    held = add_connections(table, 3)
    for one in held:
        table.mark_busy(one)
    held += add_connections(table, 1)
    assert closed_indices(held) == [3]
    table.remove_connection(held[0])
    held += add_connections(table, 1)
    assert closed_indices(held) == [3]


def test_longest_arriving_request_is_closed_when_none_is_idle() -> None:
    table = ConnectionTable("http", PortLimit(4, 4))
    held = add_connections(table, 4)
    for one in held[:3]:
        table.mark_arriving(one)
    table.mark_busy(held[0])  # it has come to its end
    held += add_connections(table, 1)
    assert closed_indices(held) == [3]  # idle ones go first
    table.mark_arriving(held[4])
    held += add_connections(table, 1)
    assert closed_indices(held) == [1, 3]
    table.mark_busy(held[5])
    table.mark_idle(held[2])  # answered before its body had come
    held += add_connections(table, 1)
    assert closed_indices(held) == [1, 2, 3]
    for one in held[4:]:
        table.mark_busy(one)
    held += add_connections(table, 1)
    assert closed_indices(held) == [1, 2, 3, 7]
    assert not held[0].is_closed


def test_limit_per_address_except_loopback() -> None:
    table = ConnectionTable("http", PortLimit(100, 2))
    assert closed_indices(add_connections(table, 4, "192.0.2.1")) == [2, 3]
    assert closed_indices(add_connections(table, 2, "192.0.2.2")) == []
    assert closed_indices(add_connections(table, 50)) == []


def test_ended_connection_is_removed() -> None:
    table = ConnectionTable("http", PortLimit(2, 2))
    for one in add_connections(table, 2):
        table.remove_connection(one)
        table.mark_idle(one)
        table.remove_connection(one)
    assert len(table) == 0
    assert closed_indices(add_connections(table, 2, "192.0.2.1")) == []
