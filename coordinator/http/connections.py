"""The connections of one HTTP port, and which of them makes room for a new one."""

from collections import Counter
from typing import Protocol

from baton import log
from baton.connection_limits import LINES_PER_SECOND, PortLimit
from baton.exposure import is_loopback
from baton.process.log_rate import RateLimitedLog

_log = log.get("http")


class Closable(Protocol):
    def close_at_once(self) -> None: ...


class ConnectionTable:
    """Connections without a request in progress are idle. When there are too many, the one that has been idle longest
    is closed; if no other is idle, the one whose request has been arriving for longest; else the new one, and that one
    too if its address has too many. `port` is its name in logs."""

    def __init__(self, port: str, limit: PortLimit) -> None:
        self.limit = limit
        self.refused = 0  # connections closed to make room, or not taken
        self._port = port
        self._addresses: dict[Closable, str] = {}
        self._idle: dict[Closable, None] = {}  # the longest idle first
        self._arriving: dict[Closable, None] = {}  # the longest arriving first
        self._per_address: Counter[str] = Counter()
        self._limited = RateLimitedLog(burst=1, per_second=LINES_PER_SECOND)

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, connection: Closable, address: str) -> None:
        self._addresses[connection] = address
        self._idle[connection] = None
        self._per_address[address] += 1
        if not is_loopback(address) and self._per_address[address] > self.limit.per_address:
            self._close(connection)
        elif len(self) > self.limit.most:
            self._close(self._least_needed(connection))

    def remove(self, connection: Closable) -> None:
        """It has ended. Also of one that is not here."""
        address = self._addresses.pop(connection, None)
        self._idle.pop(connection, None)
        self._arriving.pop(connection, None)
        if address is not None:
            self._per_address[address] -= 1
            if not self._per_address[address]:
                del self._per_address[address]

    def arriving(self, connection: Closable) -> None:
        """The head of a request has come, and no other request is in progress."""
        self._idle.pop(connection, None)
        if connection in self._addresses:
            self._arriving[connection] = None

    def busy(self, connection: Closable) -> None:
        """A whole request has come."""
        self._idle.pop(connection, None)
        self._arriving.pop(connection, None)

    def idle(self, connection: Closable) -> None:
        """Its answer has been sent."""
        self._arriving.pop(connection, None)
        if connection in self._addresses:
            self._idle[connection] = None

    def _least_needed(self, newest: Closable) -> Closable:
        longest_idle = next(iter(self._idle))
        return longest_idle if longest_idle is not newest else next(iter(self._arriving), newest)

    def _close(self, connection: Closable) -> None:
        self.refused += 1
        self.remove(connection)
        connection.close_at_once()
        self._limited.write(
            _log.warning,
            f"too many connections to the {self._port} port: one was closed",
            port=self._port,
            limit=self.limit.most,
            limit_per_address=self.limit.per_address,
            knob="ulimit -n, --max-connections, --max-connections-per-address",
        )
