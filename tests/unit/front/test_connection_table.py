"""Which HTTP connection makes room for a new one."""

from baton.connection_limits import PortLimit
from coordinator.http.connections import ConnectionTable


class Connection:
    def __init__(self) -> None:
        self.closed = False

    def close_at_once(self) -> None:
        self.closed = True


def filled(table: ConnectionTable, count: int, address: str = "127.0.0.1") -> list[Connection]:
    made = [Connection() for _ in range(count)]
    for one in made:
        table.add(one, address)
    return made


def closed(connections: list[Connection]) -> list[int]:
    return [number for number, one in enumerate(connections) if one.closed]


def test_who_has_been_idle_longest_makes_room() -> None:
    table = ConnectionTable("http", PortLimit(4, 4))
    held = filled(table, 4)
    table.busy(held[0])
    table.busy(held[1])
    table.idle(held[1])  # its answer has been sent: the last to be idle
    held += filled(table, 1)
    assert closed(held) == [2]
    held += filled(table, 2)
    assert closed(held) == [1, 2, 3]
    assert (len(table), table.refused) == (4, 3)


def test_where_all_are_busy_the_new_one_is_refused() -> None:
    table = ConnectionTable("http", PortLimit(3, 3))
    held = filled(table, 3)
    for one in held:
        table.busy(one)
    held += filled(table, 1)
    assert closed(held) == [3]
    table.remove(held[0])
    held += filled(table, 1)
    assert closed(held) == [3]


def test_requests_that_arrive_make_room_once_nobody_is_idle() -> None:
    table = ConnectionTable("http", PortLimit(4, 4))
    held = filled(table, 4)
    for one in held[:3]:
        table.arriving(one)
    table.busy(held[0])  # it has come to its end
    held += filled(table, 1)
    assert closed(held) == [3]  # idle ones go first
    table.arriving(held[4])
    held += filled(table, 1)
    assert closed(held) == [1, 3]
    table.busy(held[5])
    table.idle(held[2])  # answered before its body had come
    held += filled(table, 1)
    assert closed(held) == [1, 2, 3]
    for one in held[4:]:
        table.busy(one)
    held += filled(table, 1)
    assert closed(held) == [1, 2, 3, 7]
    assert not held[0].closed


def test_one_address_has_its_own_bound_unless_it_is_loopback() -> None:
    table = ConnectionTable("http", PortLimit(100, 2))
    assert closed(filled(table, 4, "192.0.2.1")) == [2, 3]
    assert closed(filled(table, 2, "192.0.2.2")) == []
    assert closed(filled(table, 50)) == []


def test_a_connection_that_has_ended_is_forgotten() -> None:
    table = ConnectionTable("http", PortLimit(2, 2))
    for one in filled(table, 2):
        table.remove(one)
        table.idle(one)
        table.remove(one)
    assert len(table) == 0
    assert closed(filled(table, 2, "192.0.2.1")) == []
