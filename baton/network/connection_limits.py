"""How many connections each port of a process may have, and which are closed when there are more.

Every connection uses one of the descriptors of the process. Without a share for each port, idle
connections to one port would leave none for other ports, files and outgoing connections.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.errors import ConfigError
from baton.limits import MAX_DESCRIPTORS
from baton.network.bind_policy import is_loopback

COORDINATOR_PORTS = ("http", "grpc", "admin", "cluster")
LOG_LINES_PER_SECOND = 0.1  # log lines of one kind about closed connections
_MIN_RESERVE, _MAX_RESERVE = 64, 4096  # descriptors for files, memory and outgoing connections
# Share of each port in the descriptors that are not reserved. The shares of the ports of one
# process, with the room above the limit of a gRPC port (`max_accepted`), stay below twelve.
_PORT_TWELFTHS = {
    "http": 4,
    "grpc": 3,
    "cluster": 2,
    "admin": 1,
    "transfer": 4,
    "pool": 4,
    "health": 1,
}
_CLIENT_PORTS = frozenset({"http", "grpc"})  # ports that --max-connections applies to


@dataclass(frozen=True, slots=True)
class PortLimit:
    """How many connections a port may have."""

    max_connections: int
    max_per_address: int  # from one address; loopback is exempt, as all local users share it

    @property
    def max_accepted(self) -> int:
        """Connections that a library may accept before the guard has closed the excess ones."""
        return self.max_connections + max(8, self.max_connections // 4)


def compute_port_limit(
    port: str, descriptors: int, *, max_connections: int = 0, per_address: int = 0
) -> PortLimit:
    """Return the limit of the port of this name in a process that may open `descriptors` files.

    `max_connections` and `per_address` are the configured limits, 0 for the default. Raises
    ConfigError if `max_connections` exceeds the port's share.
    """
    counted = min(descriptors, MAX_DESCRIPTORS)
    reserve = min(max(_MIN_RESERVE, counted // 8), _MAX_RESERVE)
    possible = max(8, (counted - reserve) * _PORT_TWELFTHS[port] // 12)
    if port not in _CLIENT_PORTS:
        max_connections = 0
    if max_connections > possible:
        raise ConfigError(
            f"max_connections is {max_connections}: a limit of {descriptors} open files "
            f"leaves {possible} for the {port} port: "
            "raise the limit (ulimit -n) or lower --max-connections",
            param="max_connections",
        )
    granted = max_connections or possible
    return PortLimit(granted, min(per_address or max(4, granted // 2), granted))


@dataclass(frozen=True, slots=True)
class PortConnection:
    """One connection of a port."""

    descriptor: int
    peer_address: str
    peer_port: int
    is_silent: bool  # nothing was ever received
    first_seen_at: float  # time of the first check that saw it, on a steady clock


def choose_connections_to_close(
    connections: Sequence[PortConnection], limit: PortLimit
) -> list[PortConnection]:
    """Return the connections beyond the limit.

    Those that never sent anything are closed first, the oldest first. Of the others the newest are
    closed first, so that newcomers do not displace clients at work.
    """
    silent = sorted((c for c in connections if c.is_silent), key=lambda c: c.first_seen_at)
    active = sorted((c for c in connections if not c.is_silent), key=lambda c: -c.first_seen_at)
    order = [*silent, *active]
    per_address = Counter(c.peer_address for c in connections if not is_loopback(c.peer_address))
    closed = []
    for connection in order:
        if per_address[connection.peer_address] > limit.max_per_address:
            per_address[connection.peer_address] -= 1
            closed.append(connection)
    chosen = set(closed)
    excess = len(connections) - len(closed) - limit.max_connections
    remaining: Iterable[PortConnection] = (c for c in order if c not in chosen)
    return [*closed, *(c for c, _ in zip(remaining, range(excess), strict=False))]
