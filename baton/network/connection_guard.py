"""Holds the ports of this process to their limits where a library accepts connections and tells
nobody: gRPC, libzmq.

It looks at the descriptors of the process, which the kernel lists, and shuts down what is beyond a
port's limit; the library sees a connection that has ended. It closes no descriptor, as it owns
none.
"""

import os
import socket
import struct
import threading
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
from baton.process.log_rate_limit import RateLimitedLogger

_CHECK_SECONDS = 0.5  # seconds between two looks at how many descriptors there are
_MIN_PAUSE_SECONDS = 0.02  # seconds, also when connections come all the time
_RECOUNT_SECONDS = 5.0  # seconds after which connections are counted although there are few
_MAX_CPU_SHARE = 0.02  # of a core that looking may take
_DESCRIPTOR_FOLDER = "/proc/self/fd"
_TCP_INFO_BYTES, _BYTES_RECEIVED = (
    136,
    128,
)  # struct tcp_info of linux/tcp.h: its size, and where tcpi_bytes_received is

_log = log.get_logger("connections")


@dataclass(slots=True)
class _GuardedPort:
    name: str
    limit: PortLimit
    connection_count: int = 0
    first_seen: dict[tuple[int, str, int], float] = field(default_factory=dict)


class ConnectionGuard:
    """Of one process. `close` ends its thread."""

    def __init__(self, clock: Clock = monotonic_clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # guards the next two
        self._ports: dict[int, _GuardedPort] = {}
        self._refused_counts: dict[str, int] = {}
        self._stop, self._wake = threading.Event(), threading.Event()
        self._rate_limited_log = RateLimitedLogger(burst=1, per_second=LOG_LINES_PER_SECOND)
        self._thread: threading.Thread | None = None

    def watch_port(self, name: str, port: int, limit: PortLimit) -> None:
        """Hold the TCP port on which this process listens to its limit. Once for each is enough."""
        with self._lock:
            if port not in self._ports:
                self._ports[port] = _GuardedPort(name, limit)
                self._refused_counts.setdefault(name, 0)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="connection-guard", daemon=True)
            self._thread.start()

    def get_connection_counts(self) -> dict[str, int]:
        """Connections by the name of the port, as they were counted a few seconds ago at most."""
        found: dict[str, int] = {}
        with self._lock:
            for port in self._ports.values():
                found[port.name] = found.get(port.name, 0) + port.connection_count
        return found

    def get_refused_counts(self) -> dict[str, int]:
        """How many were shut down, by the name of the port."""
        with self._lock:
            return dict(self._refused_counts)

    def check_soon(self) -> None:
        """There is a new connection."""
        self._wake.set()

    def close(self) -> None:
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        counted = 0.0
        pause = _CHECK_SECONDS
        while not self._stop.wait(_MIN_PAUSE_SECONDS):
            self._wake.wait(pause)
            self._wake.clear()
            began = self._clock()
            try:
                crowded = len(os.listdir(_DESCRIPTOR_FOLDER)) > self._lowest_limit()
                if crowded or began - counted >= _RECOUNT_SECONDS:
                    counted = began
                    self.close_excess_connections()
            except OSError as error:
                _log.error(
                    "connections are not bounded", folder=_DESCRIPTOR_FOLDER, reason=error.strerror
                )
                return
            pause = max(_CHECK_SECONDS, (self._clock() - began) / _MAX_CPU_SHARE)

    def _lowest_limit(self) -> int:
        """With fewer descriptors than that, no port can be beyond its limit."""
        with self._lock:
            return min(
                (
                    min(one.limit.max_connections, one.limit.max_per_address)
                    for one in self._ports.values()
                ),
                default=0,
            )

    def close_excess_connections(self) -> None:
        """Count the connections of every port, and shut down what is beyond its limit."""
        with self._lock:
            ports = dict(self._ports)
        found = _list_connections(set(ports))
        now = self._clock()
        for number, port in ports.items():
            seen = {one[:3]: port.first_seen.get(one[:3], now) for one in found[number]}
            held = [PortConnection(*one, seen[one[:3]]) for one in found[number]]
            closed = [
                one
                for one in choose_connections_to_close(held, port.limit)
                if _shut_down(one, number)
            ]
            with self._lock:
                port.first_seen = seen
                port.connection_count = len(held) - len(closed)
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
    """A socket object for a descriptor of somebody else, who goes on owning it. Raises OSError for
    no socket."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _list_connections(ports: set[int]) -> dict[int, list[tuple[int, str, int, bool]]]:
    """Of each of these local ports: descriptor, address and port of the other end, whether it was
    silent."""
    found: dict[int, list[tuple[int, str, int, bool]]] = {port: [] for port in ports}
    for name in os.listdir(_DESCRIPTOR_FOLDER):
        try:
            with _borrow_socket(int(name)) as one:
                local = _local_port(one)
                if local in ports:
                    address, port = one.getpeername()[:2]
                    found[local].append(
                        (int(name), _without_ipv4_mapping(address), port, _is_silent(one))
                    )
        except OSError:  # no socket, one that listens, or one that is closed by now
            continue
    return found


def _shut_down(connection: PortConnection, port: int) -> bool:
    """Whether it was still the same connection."""
    try:
        with _borrow_socket(connection.descriptor) as one:
            address, remote = one.getpeername()[:2]
            if _local_port(one) != port or (_without_ipv4_mapping(address), remote) != (
                connection.peer_address,
                connection.peer_port,
            ):
                return False
            one.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True


def _local_port(one: socket.socket) -> int | None:
    if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
        return None
    port: int = one.getsockname()[1]
    return port


def _is_silent(one: socket.socket) -> bool:
    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return len(info) == _TCP_INFO_BYTES and struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0] == 0


def _without_ipv4_mapping(address: str) -> str:
    """An IPv4 address in IPv6's clothes as itself."""
    return address.removeprefix("::ffff:")
