"""Enforces the connection limits of ports whose library accepts connections itself: gRPC, libzmq.

A thread lists the descriptors of the process and shuts down connections beyond a port's limit. The
library then sees a connection that the peer has closed. The guard closes no descriptor, because it
owns none.
"""

import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from baton.network.connection_limits import (
    LOG_LINES_PER_SECOND,
    PortConnection,
    PortLimit,
    choose_connections_to_close,
)
from baton.process import log
from baton.process.clock import Clock, monotonic_clock
from baton.process.descriptors import get_descriptor_limit
from baton.process.log_rate_limit import RateLimitedLogger

_CHECK_SECONDS = 0.5  # between two checks of the number of descriptors
_MIN_PAUSE_SECONDS = 0.02  # between two checks when connections arrive all the time
_RECOUNT_SECONDS = 5.0  # after which connections are counted although there are few
_MAX_CPU_SHARE = 0.02  # of one core, for counting
_DESCRIPTOR_FOLDER = "/proc/self/fd"
# struct tcp_info of linux/tcp.h: its size, and the offset of tcpi_bytes_received.
_TCP_INFO_BYTES, _BYTES_RECEIVED = 136, 128

_log = log.get_logger("connections")


@dataclass(slots=True)
class _GuardedPort:
    name: str
    limit: PortLimit
    connection_count: int = 0
    # Time of the first check that saw it, by descriptor, peer address and peer port.
    first_seen: dict[tuple[int, str, int], float] = field(default_factory=dict)


class ConnectionGuard:
    """Enforces the limits of the watched ports of one process. `close` ends its thread."""

    def __init__(self, clock: Clock = monotonic_clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # guards _ports and _refused_counts
        self._ports: dict[int, _GuardedPort] = {}
        self._refused_counts: dict[str, int] = {}
        self._stop, self._wake = threading.Event(), threading.Event()
        self._rate_limited_log = RateLimitedLogger(burst=1, per_second=LOG_LINES_PER_SECOND)
        self._thread: threading.Thread | None = None

    def watch_port(self, name: str, port: int, limit: PortLimit) -> None:
        """Enforce the limit of a TCP port on which this process listens. Idempotent."""
        with self._lock:
            if port not in self._ports:
                self._ports[port] = _GuardedPort(name, limit)
                self._refused_counts.setdefault(name, 0)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="connection-guard", daemon=True)
            self._thread.start()

    def get_connection_counts(self) -> dict[str, int]:
        """Return the number of connections by port name, at most a few seconds old."""
        found: dict[str, int] = {}
        with self._lock:
            for port in self._ports.values():
                found[port.name] = found.get(port.name, 0) + port.connection_count
        return found

    def get_refused_counts(self) -> dict[str, int]:
        """Return the number of connections that were shut down, by port name."""
        with self._lock:
            return dict(self._refused_counts)

    def check_soon(self) -> None:
        """Check the limits without waiting for the next regular check."""
        self._wake.set()

    def close(self) -> None:
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        counted_at = 0.0
        pause = _CHECK_SECONDS
        while not self._stop.wait(_MIN_PAUSE_SECONDS):
            self._wake.wait(pause)
            self._wake.clear()
            now, cpu_seconds = self._clock(), time.thread_time()
            crowded = len(_list_descriptors()) > self._lowest_limit()
            if crowded or now - counted_at >= _RECOUNT_SECONDS:
                counted_at = now
                self.close_excess_connections()
            # CPU time, because a check waits long for a core when a flood of connections keeps
            # the process busy, and a pause in proportion would leave the flood alone.
            pause = max(_CHECK_SECONDS, (time.thread_time() - cpu_seconds) / _MAX_CPU_SHARE)

    def _lowest_limit(self) -> int:
        """Return the smallest limit. With fewer descriptors no port can exceed its limit."""
        with self._lock:
            return min(
                (
                    min(port.limit.max_connections, port.limit.max_per_address)
                    for port in self._ports.values()
                ),
                default=0,
            )

    def close_excess_connections(self) -> None:
        """Count the connections of every port, and shut down those beyond its limit."""
        with self._lock:
            ports = dict(self._ports)
        found = _list_connections(set(ports))
        now = self._clock()
        for number, port in ports.items():
            first_seen = {row[:3]: port.first_seen.get(row[:3], now) for row in found[number]}
            connections = [PortConnection(*row, first_seen[row[:3]]) for row in found[number]]
            closed = [
                connection
                for connection in choose_connections_to_close(connections, port.limit)
                if _shut_down(connection, number)
            ]
            with self._lock:
                port.first_seen = first_seen
                port.connection_count = len(connections) - len(closed)
                self._refused_counts[port.name] += len(closed)
            if closed:
                self._log_closed(port, len(closed))

    def _log_closed(self, port: _GuardedPort, closed: int) -> None:
        self._rate_limited_log.log_event(
            _log.warning,
            f"too many connections to the {port.name} port: the oldest silent ones were closed",
            port=port.name,
            closed=closed,
            limit=port.limit.max_connections,
            limit_per_address=port.limit.max_per_address,
            knob="ulimit -n, --max-connections, --max-connections-per-address",
        )


@contextmanager
def _borrow_socket(descriptor: int) -> Iterator[socket.socket]:
    """A socket object for a descriptor that its owner keeps. Raises OSError if it is no socket."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _list_descriptors() -> list[int]:
    """Return the open descriptors of this process.

    The folder cannot be read when no descriptor is left, which is when connections have to be
    closed, or without /proc. Then every number below the limit is tried.
    """
    try:
        return [int(name) for name in os.listdir(_DESCRIPTOR_FOLDER)]
    except OSError:
        return [number for number in range(get_descriptor_limit()) if _is_open(number)]


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError as error:
        return error.errno != errno.EBADF
    return True


def _list_connections(ports: set[int]) -> dict[int, list[tuple[int, str, int, bool]]]:
    """Return the connections of each of these local ports.

    Each is (descriptor, peer address, peer port, whether nothing was received).
    """
    found: dict[int, list[tuple[int, str, int, bool]]] = {port: [] for port in ports}
    for descriptor in _list_descriptors():
        try:
            with _borrow_socket(descriptor) as sock:
                local = _local_port(sock)
                if local in ports:
                    address, port = sock.getpeername()[:2]
                    found[local].append(
                        (descriptor, _without_ipv4_mapping(address), port, _is_silent(sock))
                    )
        except OSError:  # not a socket, a listening one, or closed in the meantime
            continue
    return found


def _shut_down(connection: PortConnection, port: int) -> bool:
    """Shut a connection down. False if the descriptor belongs to another connection by now."""
    try:
        with _borrow_socket(connection.descriptor) as sock:
            address, remote = sock.getpeername()[:2]
            if _local_port(sock) != port or (_without_ipv4_mapping(address), remote) != (
                connection.peer_address,
                connection.peer_port,
            ):
                return False
            sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True


def _local_port(sock: socket.socket) -> int | None:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return None
    port: int = sock.getsockname()[1]
    return port


def _is_silent(sock: socket.socket) -> bool:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return len(info) == _TCP_INFO_BYTES and struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0] == 0


def _without_ipv4_mapping(address: str) -> str:
    """Return an IPv4-mapped IPv6 address as an IPv4 address, and any other unchanged."""
    return address.removeprefix("::ffff:")
