"""The connections of one HTTP port, and the choice of one to close when there are too many."""

from collections import Counter
from typing import Protocol

from baton.network.bind_policy import is_loopback
from baton.network.connection_limits import LOG_LINES_PER_SECOND, PortLimit
from baton.process import log
from baton.process.log_rate_limit import RateLimitedLogger

_log = log.get_logger("http")


class AbortableConnection(Protocol):
    def abort_connection(self) -> None: ...


class ConnectionTable:
    """All connections of one port. A connection without a request in progress is idle.

    When there are too many, the connection that has been idle longest is closed; if no other is
    idle, the one whose request has been arriving for longest; else the new one. A new connection
    whose address has too many is closed, too.
    """

    def __init__(self, port: str, limit: PortLimit) -> None:
        """`port` is the name of the port in logs."""
        self.limit = limit
        self.refused_connections = 0  # closed because there were too many
        self._port = port
        self._addresses: dict[AbortableConnection, str] = {}
        self._idle: dict[AbortableConnection, None] = {}  # longest idle first
        self._arriving: dict[AbortableConnection, None] = {}  # longest arriving first
        self._per_address: Counter[str] = Counter()
        self._limited = RateLimitedLogger(burst=1, per_second=LOG_LINES_PER_SECOND)

    def __len__(self) -> int:
        return len(self._addresses)

    def add_connection(self, connection: AbortableConnection, address: str) -> None:
        self._addresses[connection] = address
        self._idle[connection] = None
        self._per_address[address] += 1
        if not is_loopback(address) and self._per_address[address] > self.limit.max_per_address:
            self._refuse_connection(connection)
        elif len(self) > self.limit.max_connections:
            self._refuse_connection(self._least_needed(connection))

    def remove_connection(self, connection: AbortableConnection) -> None:
        """Remove a connection that has ended. Idempotent."""
        address = self._addresses.pop(connection, None)
        self._idle.pop(connection, None)
        self._arriving.pop(connection, None)
        if address is not None:
            self._per_address[address] -= 1
            if not self._per_address[address]:
                del self._per_address[address]

    def mark_arriving(self, connection: AbortableConnection) -> None:
        """The head of a request has arrived, and no other request is in progress."""
        self._idle.pop(connection, None)
        if connection in self._addresses:
            self._arriving[connection] = None

    def mark_busy(self, connection: AbortableConnection) -> None:
        """A whole request has arrived."""
        self._idle.pop(connection, None)
        self._arriving.pop(connection, None)

    def mark_idle(self, connection: AbortableConnection) -> None:
        """The response has been sent."""
        self._arriving.pop(connection, None)
        if connection in self._addresses:
            self._idle[connection] = None

    def _least_needed(self, newest: AbortableConnection) -> AbortableConnection:
        longest_idle = next(iter(self._idle))
        return longest_idle if longest_idle is not newest else next(iter(self._arriving), newest)

    def _refuse_connection(self, connection: AbortableConnection) -> None:
        self.refused_connections += 1
        self.remove_connection(connection)
        connection.abort_connection()
        self._limited.log_event(
            _log.warning,
            f"too many connections to the {self._port} port: one was closed",
            port=self._port,
            limit=self.limit.max_connections,
            limit_per_address=self.limit.max_per_address,
            knob="ulimit -n, --max-connections, --max-connections-per-address",
        )
