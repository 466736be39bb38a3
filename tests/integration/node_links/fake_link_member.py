"""A member of the cluster that only records what its link delivers."""

from collections.abc import Callable

from baton.pb import cluster_pb2 as pb
from baton.pb.cluster_pb2 import CoordinatorMessage
from baton.types import Incarnation
from node_engine.core.node_commands import CoordinatorLost, NodeJoined
from node_engine.host.command_codec import command_from_pb


class FakeLinkMember:
    """The member that is linked."""

    build_join, build_stats = pb.Join, pb.NodeStats

    def __init__(self, deliver: Callable[[object], None]) -> None:
        self._deliver = deliver

    def on_joined(self, incarnation: Incarnation) -> None:
        self._deliver(NodeJoined(incarnation))

    def on_coordinator_lost(self) -> None:
        self._deliver(CoordinatorLost())

    def on_message(self, message: CoordinatorMessage) -> None:
        command = command_from_pb(message)
        if command is not None:
            self._deliver(command)
