"""The guard on sockets that somebody else owns."""

import os
import socket
from collections.abc import Iterator

import pytest

from baton.connection_guard import ConnectionGuard
from baton.connection_limits import PortLimit

MOST = 4


class Port:
    """A listening socket, the connections that it has accepted, and their other ends."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.dialled: list[socket.socket] = []
        self.accepted: list[socket.socket] = []

    @property
    def number(self) -> int:
        return int(self.listening.getsockname()[1])

    def connect(self) -> socket.socket:
        one = socket.create_connection(self.listening.getsockname(), timeout=30)
        self.dialled.append(one)
        self.accepted.append(self.listening.accept()[0])
        return one

    def ended(self) -> list[int]:
        """Which of the other ends have been told that it is over."""
        found = []
        for number, one in enumerate(self.dialled):
            one.setblocking(False)
            try:
                if one.recv(1) == b"":
                    found.append(number)
            except BlockingIOError:
                pass
        return found

    def close(self) -> None:
        for one in (self.listening, *self.dialled, *self.accepted):
            one.close()


@pytest.fixture
def port() -> Iterator[Port]:
    made = Port()
    yield made
    made.close()


def guard_of(port: Port, most: int = MOST) -> ConnectionGuard:
    guard = ConnectionGuard()
    guard.watch("grpc", port.number, PortLimit(most, most))
    return guard


def test_what_is_beyond_the_limit_is_shut_down_and_counted(port: Port) -> None:
    for _ in range(MOST + 3):
        port.connect()
    port.dialled[0].send(b"PRI * HTTP/2.0")
    guard = guard_of(port)
    descriptors = set(os.listdir("/proc/self/fd"))
    guard.sweep()
    assert port.ended() == [1, 2, 3]  # the silent ones; gRPC would close their descriptors now, the guard does not
    assert set(os.listdir("/proc/self/fd")) == descriptors
    assert (guard.held(), guard.refused()) == ({"grpc": MOST}, {"grpc": 3})
    guard.close()


def test_it_looks_by_itself(port: Port) -> None:
    guard = guard_of(port, most=1)
    for _ in range(3):
        port.connect()
    guard.look_soon()
    assert port.dialled[0].recv(1) == b""  # blocks until it has
    guard.close()


def test_other_ports_and_its_own_dials_are_left_alone(port: Port) -> None:
    other = Port()
    for _ in range(MOST):
        port.connect()
        other.connect()
    guard = guard_of(port)
    guard.sweep()
    assert (port.ended(), other.ended(), guard.refused()) == ([], [], {"grpc": 0})
    guard.close()
    other.close()
