"""How many connections each port of a process may hold, and which are closed when there are more.

Every connection is a descriptor, and descriptors are the process's: without shares, idle
connections to one port would leave none for the others, for files, and for what the process dials
itself.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.errors import ConfigError
from baton.limits import MAX_DESCRIPTORS
from baton.network.bind_policy import is_loopback

COORDINATOR_PORTS = ("http", "grpc", "admin", "cluster")
LOG_LINES_PER_SECOND = 0.1  # in the log, of one kind, about connections that were closed
_MIN_RESERVE, _MAX_RESERVE = (
    64,
    4096,
)  # descriptors that no port gets: files, memory, dialling, this process's own
_PORT_TWELFTHS = {
    "http": 4,
    "grpc": 3,
    "cluster": 2,
    "admin": 1,
    "transfer": 4,
    "pool": 4,
    "health": 1,
}  # of what the reserve leaves; the ports of one process, with the room above a gRPC port's limit, stay below twelve
_CLIENT_PORTS = frozenset({"http", "grpc"})  # that --max-connections is about


@dataclass(frozen=True, slots=True)
class PortLimit:
    max_connections: int  # connections
    max_per_address: (
        int  # of one address that is not loopback: all users of this machine share that one
    )

    @property
    def max_accepted(self) -> int:
        """Where a library accepts by itself, what it may hold until the oldest silent ones have
        been closed."""
        return self.max_connections + max(8, self.max_connections // 4)


def compute_port_limit(
    port: str, descriptors: int, *, most: int = 0, per_address: int = 0
) -> PortLimit:
    """Of the port of this name in a process that may open `descriptors`. `most` and `per_address`
    are what was configured, 0 for what follows from the limit. Raises ConfigError for more than
    there can be."""
    counted = min(descriptors, MAX_DESCRIPTORS)
    reserve = min(max(_MIN_RESERVE, counted // 8), _MAX_RESERVE)
    possible = max(8, (counted - reserve) * _PORT_TWELFTHS[port] // 12)
    if port not in _CLIENT_PORTS:
        most = 0
    if most > possible:
        raise ConfigError(
            f"max_connections is {most}: a limit of {descriptors} open files leaves {possible} for the {port} port: "
            f"raise the limit (ulimit -n) or lower --max-connections",
            param="max_connections",
        )
    granted = most or possible
    return PortLimit(granted, min(per_address or max(4, granted // 2), granted))


@dataclass(frozen=True, slots=True)
class PortConnection:
    """One that a port holds."""

    descriptor: int
    peer_address: str  # of the other end
    peer_port: int  # of the other end
    is_silent: bool  # nothing was ever received
    first_seen_at: float  # when it was first seen, on a steady clock


def choose_connections_to_close(
    held: Sequence[PortConnection], limit: PortLimit
) -> list[PortConnection]:
    """What is beyond the limit. The first to go are those that never sent anything, the oldest
    first; then the newest: who was here before is not pushed out."""
    silent = sorted((one for one in held if one.is_silent), key=lambda one: one.first_seen_at)
    spoke = sorted((one for one in held if not one.is_silent), key=lambda one: -one.first_seen_at)
    order = [*silent, *spoke]
    per_address = Counter(one.peer_address for one in held if not is_loopback(one.peer_address))
    closed = []
    for one in order:
        if per_address[one.peer_address] > limit.max_per_address:
            per_address[one.peer_address] -= 1
            closed.append(one)
    chosen = set(closed)
    excess = len(held) - len(closed) - limit.max_connections
    rest: Iterable[PortConnection] = (one for one in order if one not in chosen)
    return [*closed, *(one for one, _ in zip(rest, range(excess), strict=False))]
