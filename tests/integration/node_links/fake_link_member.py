"""A member of the cluster that only records what its link delivers."""

from collections.abc import Callable

from baton.cluster_link.messages import PROTOCOL_VERSION, PoolJoinInfo
from baton.cluster_link.report_types import NodeStats
from baton.kv.blocks import KVLayout
from baton.types import Incarnation, NodeName
from node_engine.core.node_commands import CoordinatorLost, NodeJoined


class FakeLinkMember:
    """The member that is linked."""

    build_stats = NodeStats

    def build_join(self) -> PoolJoinInfo:
        layout = KVLayout(1, 1, 8, 16, "float32")
        return PoolJoinInfo(
            PROTOCOL_VERSION, NodeName("pool-0"), "host-0", "127.0.0.1:1", 1, "ab" * 32, layout, 1
        )

    def __init__(self, deliver: Callable[[object], None]) -> None:
        self._deliver = deliver

    def on_joined(self, incarnation: Incarnation) -> None:
        self._deliver(NodeJoined(incarnation))

    def on_coordinator_lost(self) -> None:
        self._deliver(CoordinatorLost())
