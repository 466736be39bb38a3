"""Nodes taken out of service, by name, so that a restarted node stays out until it is put back.

The set is not stored: a coordinator that restarts has forgotten it.
"""

from enum import Enum

from baton.errors import InvalidRequest
from baton.pb.cluster_pb2 import NodeStats
from baton.types import NodeName

MAX_DRAINED_NODES = 1024
# heartbeats since the last work ended there: the second was sent after every order had arrived
MIN_QUIET_REPORTS = 2  # the second of them was sent after every order had arrived


class NodeServiceState(Enum):
    """Whether a node is given new work, and if not, whether it still has some."""

    IN_SERVICE = "in"
    DRAINING = "draining"
    DRAINED = "drained"
    SWITCHING = "switching"  # to another role


class DrainSet:
    """Names that get no new work, with the time at which their remaining work is placed again."""

    def __init__(self) -> None:
        self._deadlines: dict[NodeName, float | None] = {}
        self.names = self._deadlines.keys()

    def __contains__(self, name: NodeName) -> bool:
        return name in self._deadlines

    def start_drain(self, name: NodeName, until: float | None) -> None:
        """Give the node no new work, and have the rest placed again at `until` (None: never). A
        second call replaces `until`. Raises InvalidRequest if too many names are drained."""
        if name not in self._deadlines and len(self._deadlines) >= MAX_DRAINED_NODES:
            raise InvalidRequest(
                f"{MAX_DRAINED_NODES} names are drained, which is the most: undrain some",
                param="node",
            )
        self._deadlines[name] = until

    def end_drain(self, name: NodeName) -> bool:
        """Put the name back in service; return whether it was drained."""
        known = name in self._deadlines
        self._deadlines.pop(name, None)
        return known

    def get_deadline(self, name: NodeName) -> float | None:
        return self._deadlines.get(name)

    def next_deadline(self) -> float | None:
        return min((until for until in self._deadlines.values() if until is not None), default=None)

    def pop_due(self, now: float) -> list[NodeName]:
        """Return the names whose time is over; each is returned once."""
        found = [
            name for name, until in self._deadlines.items() if until is not None and until <= now
        ]
        for name in found:
            self._deadlines[name] = None
        return found


def is_node_empty(attempts: int, quiet_reports: int, stats: NodeStats | None) -> bool:
    """Return whether a node holds no work, by the coordinator's books and by its own reports."""
    if attempts or quiet_reports < MIN_QUIET_REPORTS or stats is None:
        return False
    held = (
        stats.blocks_reserved
        + stats.blocks_writing
        + stats.blocks_in_use
        + stats.blocks_quarantined
    )
    return not (held or stats.waiting or stats.running)
