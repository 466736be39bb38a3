"""Lets the shared pools of hosts join, handles their reports and removes them."""

from collections.abc import Callable

from baton.cluster_link.messages import (
    CacheEvents,
    CacheSnapshot,
    CacheSnapshotRequest,
    Heartbeat,
    NodeLeaving,
    NodeReport,
    PoolJoinInfo,
)
from baton.errors import BatonError, NodeLost
from baton.types import Incarnation
from coordinator.core.common.counters import Counters
from coordinator.core.common.effects import Effect, MemberLost, SendOrder
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.membership.pool_registry import PoolRegistry
from coordinator.core.membership.prefix_directory import PrefixDirectory


class PoolMembership:
    """Adds and removes shared pools; `emit_effect` takes what the shell must do."""

    def __init__(
        self,
        node_registry: NodeRegistry,
        pool_registry: PoolRegistry,
        prefix_directory: PrefixDirectory,
        counters: Counters,
        emit_effect: Callable[[Effect], None],
    ) -> None:
        self._node_registry = node_registry
        self._pool_registry = pool_registry
        self._prefix_directory = prefix_directory
        self._counters = counters
        self._emit_effect = emit_effect

    def join_pool(self, info: PoolJoinInfo, incarnation: Incarnation, now: float) -> None:
        """Add a pool in place of an older incarnation. Raises ConfigError, which is counted."""
        model = self._node_registry.model_identity if self._node_registry.nodes else None
        try:
            replaced = self._pool_registry.check_join(info, model, now)
        except BatonError:
            self._counters.joins["refused"] += 1
            raise
        if replaced is not None:
            self.remove_pool(replaced.incarnation, NodeLost(f"pool {info.name} has joined anew"))
        self._pool_registry.add_pool(info, incarnation, now)
        self._prefix_directory.add_node(incarnation, info.num_blocks)
        self._counters.joins["joined"] += 1

    def receive_report(self, sender: Incarnation, message: NodeReport, now: float) -> bool:
        """Handle a report if a pool sent it; return whether one did."""
        pool = self._pool_registry.members.get(sender)
        if pool is None:
            return False
        pool.heard_at = now
        match message:
            case Heartbeat(stats):
                pool.stats = stats
            case CacheSnapshot(sequence, block_hashes):
                self._prefix_directory.apply_snapshot(sender, sequence, block_hashes)
            case CacheEvents(sequence, inserted, evicted):
                if self._prefix_directory.apply_events(sender, sequence, inserted, evicted, now):
                    self._emit_effect(SendOrder(sender, CacheSnapshotRequest()))
            case NodeLeaving():
                pass
            case _:
                self._counters.dropped_messages["unexpected"] += 1
        return True

    def remove_pool(self, incarnation: Incarnation, error: BatonError) -> None:
        """Remove the pool; does nothing for an unknown incarnation. Nodes notice by themselves."""
        pool = self._pool_registry.members.pop(incarnation, None)
        if pool is not None:
            self._prefix_directory.remove_node(incarnation)
            self._emit_effect(MemberLost(incarnation, pool.info.name, error, is_expected=False))

    def remove_silent_pools(self, now: float) -> None:
        """Remove pools that have sent nothing for longer than the silence timeout."""
        for pool, error in self._pool_registry.find_expired(now):
            self.remove_pool(pool.incarnation, error)
