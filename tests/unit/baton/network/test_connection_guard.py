"""The guard on sockets that somebody else owns."""

import contextlib
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from baton.network.connection_guard import ConnectionGuard
from baton.network.connection_limits import PortLimit

MOST = 4


class ListeningPort:
    """A listening socket, the connections that it has accepted, and their other ends."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.dialled: list[socket.socket] = []
        self.accepted: list[socket.socket] = []

    @property
    def number(self) -> int:
        return int(self.listening.getsockname()[1])

    def connect(self) -> socket.socket:
        connection = socket.create_connection(self.listening.getsockname(), timeout=30)
        self.dialled.append(connection)
        self.accepted.append(self.listening.accept()[0])
        return connection

    def closed_peers(self) -> list[int]:
        """Which of the other ends have been told that it is over."""
        found = []
        for number, connection in enumerate(self.dialled):
            connection.setblocking(False)
            try:
                if connection.recv(1) == b"":
                    found.append(number)
            except BlockingIOError:
                pass
        return found

    def close(self) -> None:
        for connection in (self.listening, *self.dialled, *self.accepted):
            connection.close()


@pytest.fixture
def port() -> Iterator[ListeningPort]:
    port = ListeningPort()
    yield port
    port.close()


def make_guard(port: ListeningPort, most: int = MOST) -> ConnectionGuard:
    guard = ConnectionGuard()
    guard.watch_port("grpc", port.number, PortLimit(most, most))
    return guard


def test_excess_connections_are_closed_and_counted(port: ListeningPort) -> None:
    for _ in range(MOST + 3):
        port.connect()
    port.dialled[0].send(b"PRI * HTTP/2.0")
    guard = make_guard(port)
    descriptors = set(os.listdir("/proc/self/fd"))
    guard.close_excess_connections()
    assert port.closed_peers() == [
        1,
        2,
        3,
    ]  # the silent ones; gRPC would close their descriptors now, the guard does not
    assert set(os.listdir("/proc/self/fd")) == descriptors
    assert (guard.get_connection_counts(), guard.get_refused_counts()) == (
        {"grpc": MOST},
        {"grpc": 3},
    )
    guard.close()


def test_guard_thread_closes_excess_connections(port: ListeningPort) -> None:
    guard = make_guard(port, most=1)
    for _ in range(3):
        port.connect()
    guard.check_soon()
    assert port.dialled[0].recv(1) == b""  # blocks until it has
    guard.close()


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Lower the limit of this process, and open files up to it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 20, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(held[0]))
        with pytest.raises(OSError, match="Too many open files"):
            os.listdir("/proc/self/fd")
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)


def test_guard_thread_closes_connections_that_took_every_descriptor(port: ListeningPort) -> None:
    guard = make_guard(port, most=1)
    for _ in range(3):
        port.connect()
    with no_descriptor_left():
        guard.check_soon()
        assert port.dialled[0].recv(1) == b""
    port.connect()
    guard.check_soon()
    assert port.dialled[1].recv(1) == b""  # the thread is still there
    guard.close()


def test_other_ports_and_outgoing_connections_are_untouched(port: ListeningPort) -> None:
    other = ListeningPort()
    for _ in range(MOST):
        port.connect()
        other.connect()
    guard = make_guard(port)
    guard.close_excess_connections()
    assert (port.closed_peers(), other.closed_peers(), guard.get_refused_counts()) == (
        [],
        [],
        {"grpc": 0},
    )
    guard.close()
    other.close()
