"""What the brain does with a pool: lets it join, hears it, and gives it up."""

from baton.errors import BatonError, NodeLost
from baton.types import Incarnation
from coordinator.core.common import messages as m
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.membership.pool_registry import PoolJoinInfo
from coordinator.core.requests.table import RequestTable


class PoolMembership:
    """Leaves effects in the table's `out`."""

    def __init__(self, registry: NodeRegistry, table: RequestTable) -> None:
        self._node_registry = registry
        self._table = table
        self._placement_state = table.placement_state
        self._pool_registry = table.placement_state.pools

    def join_pool(self, info: PoolJoinInfo, incarnation: Incarnation, now: float) -> None:
        """Raises ConfigError, counted."""
        joins = self._table.counters.joins
        model = self._node_registry.model_identity if self._node_registry.nodes else None
        try:
            replaced = self._pool_registry.check_join(info, model, now)
        except BatonError:
            joins["refused"] += 1
            raise
        if replaced is not None:
            self.remove_pool(replaced.incarnation, NodeLost(f"pool {info.name} has joined anew"))
        self._pool_registry.add_pool(info, incarnation, now)
        self._placement_state.prefix_directory.add_node(incarnation, info.num_blocks)
        joins["joined"] += 1

    def receive_report(self, sender: Incarnation, message: m.NodeReport, now: float) -> bool:
        """Whether `sender` is a pool."""
        pool = self._pool_registry.members.get(sender)
        if pool is None:
            return False
        pool.heard_at = now
        match message:
            case m.Heartbeat(stats):
                pool.stats = stats
            case m.CacheSnapshot():
                self._placement_state.apply_cache_snapshot(sender, message)
            case m.CacheEvents():
                if self._placement_state.apply_cache_events(sender, message, now):
                    self._table.effects.append(m.SendOrder(sender, m.CacheSnapshotRequest()))
            case m.NodeLeaving():
                pass
            case _:
                self._table.counters.dropped_messages["unexpected"] += 1
        return True

    def remove_pool(self, incarnation: Incarnation, error: BatonError) -> None:
        """A no-op for who is no pool. Its nodes find out by themselves."""
        pool = self._pool_registry.members.pop(incarnation, None)
        if pool is not None:
            self._placement_state.remove_node(incarnation)
            self._table.effects.append(
                m.MemberLost(incarnation, pool.info.name, error, is_expected=False)
            )

    def remove_silent_pools(self, now: float) -> None:
        for pool, error in self._pool_registry.find_expired(now):
            self.remove_pool(pool.incarnation, error)
