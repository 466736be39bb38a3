"""What the brain does with a pool: lets it join, hears it, and gives it up."""

from baton.errors import BatonError, NodeGone
from baton.types import Incarnation
from coordinator.core import messages as m
from coordinator.core.pools import PoolInfo
from coordinator.core.registry import Registry
from coordinator.core.requests import RequestTable


class PoolDesk:
    """Leaves effects in the table's `out`."""

    def __init__(self, registry: Registry, table: RequestTable) -> None:
        self._registry = registry
        self._table = table
        self._knowledge = table.knowledge
        self._pools = table.knowledge.pools

    def join(self, info: PoolInfo, incarnation: Incarnation, now: float) -> None:
        """Raises ConfigError, counted."""
        joins = self._table.counters.joins
        model = self._registry.model if self._registry.nodes else None
        try:
            replaced = self._pools.check(info, model, now)
        except BatonError:
            joins["refused"] += 1
            raise
        if replaced is not None:
            self.drop(replaced.incarnation, NodeGone(f"pool {info.name} has joined anew"))
        self._pools.add(info, incarnation, now)
        self._knowledge.directory.join(incarnation, info.num_blocks)
        joins["joined"] += 1

    def hear(self, sender: Incarnation, message: m.NodeInput, now: float) -> bool:
        """Whether `sender` is a pool."""
        pool = self._pools.members.get(sender)
        if pool is None:
            return False
        pool.heard_at = now
        match message:
            case m.Heartbeat(stats):
                pool.stats = stats
            case m.CacheSnapshot():
                self._knowledge.cache_snapshot(sender, message)
            case m.CacheEvents():
                if self._knowledge.cache_events(sender, message, now):
                    self._table.out.append(m.Send(sender, m.CacheQuery()))
            case m.Leaving():
                pass
            case _:
                self._table.counters.dropped_messages["unexpected"] += 1
        return True

    def drop(self, incarnation: Incarnation, error: BatonError) -> None:
        """A no-op for who is no pool. Its nodes find out by themselves."""
        pool = self._pools.members.pop(incarnation, None)
        if pool is not None:
            self._knowledge.left(incarnation)
            self._table.out.append(m.Lost(incarnation, pool.info.name, error, expected=False))

    def expire(self, now: float) -> None:
        for pool, error in self._pools.expired(now):
            self.drop(pool.incarnation, error)
