"""Nodes taken out of service, by name, so that one that restarts stays out until somebody puts it back. Nobody else
keeps it: a coordinator that restarts has forgotten it."""

from enum import Enum

from baton.errors import InvalidRequest
from baton.pb.cluster_pb2 import NodeStats
from baton.types import NodeName

MAX_NAMES = 1024
QUIET_REPORTS = 2  # heartbeats since the last work ended there: the second was sent after every order had arrived


class Service(Enum):
    """Whether a node is given new work, and if not, whether it still has some."""

    IN = "in"
    DRAINING = "draining"
    DRAINED = "drained"
    SWITCHING = "switching"  # to another role


class Drains:
    def __init__(self) -> None:
        self._until: dict[NodeName, float | None] = {}
        self.names = self._until.keys()

    def __contains__(self, name: NodeName) -> bool:
        return name in self._until

    def begin(self, name: NodeName, until: float | None) -> None:
        """Give it no new work; what it holds at `until` is to be placed again (None: never). Again: a new `until`."""
        if name not in self._until and len(self._until) >= MAX_NAMES:
            raise InvalidRequest(f"{MAX_NAMES} names are drained, which is the most: undrain some", param="node")
        self._until[name] = until

    def end(self, name: NodeName) -> bool:
        """Whether it was out of service."""
        known = name in self._until
        self._until.pop(name, None)
        return known

    def until(self, name: NodeName) -> float | None:
        return self._until.get(name)

    def next(self) -> float | None:
        return min((until for until in self._until.values() if until is not None), default=None)

    def due(self, now: float) -> list[NodeName]:
        """Those whose patience is over; each is told once."""
        found = [name for name, until in self._until.items() if until is not None and until <= now]
        for name in found:
            self._until[name] = None
        return found


def is_empty(attempts: int, quiet_reports: int, stats: NodeStats | None) -> bool:
    """Nothing is placed on the node by the coordinator's books, and by the node's own word it holds nothing."""
    if attempts or quiet_reports < QUIET_REPORTS or stats is None:
        return False
    held = stats.blocks_reserved + stats.blocks_writing + stats.blocks_in_use + stats.blocks_quarantined
    return not (held or stats.waiting or stats.running)
