"""What hosts' pools do to the brain's knowledge: they come, tell what they hold, and go. Nothing is placed on them."""

from baton.errors import BatonError, NodeGone
from baton.types import Incarnation
from coordinator.core.messages import CacheEvents, CacheQuery, CacheSnapshot, Heartbeat, Leaving, Lost, NodeInput, Send
from coordinator.core.pools import PoolInfo, PoolMember
from coordinator.core.requests import RequestTable


def join(
    table: RequestTable, info: PoolInfo, incarnation: Incarnation, replaced: PoolMember | None, now: float
) -> None:
    """`replaced`: an older one of its name, which is gone."""
    knowledge = table.knowledge
    if replaced is not None:
        drop(table, replaced, NodeGone(f"pool {info.name} has joined anew"))
    knowledge.pools.add(info, incarnation, now)
    knowledge.directory.join(incarnation, info.num_blocks)


def hear(table: RequestTable, pool: PoolMember, message: NodeInput, now: float) -> None:
    pool.heard_at = now
    match message:
        case Heartbeat(stats):
            pool.stats = stats
        case CacheSnapshot():
            table.knowledge.cache_snapshot(pool.incarnation, message)
        case CacheEvents():
            if table.knowledge.cache_events(pool.incarnation, message, now):
                table.out.append(Send(pool.incarnation, CacheQuery()))
        case Leaving():
            pass
        case _:
            table.counters.dropped_messages["unexpected"] += 1


def drop(table: RequestTable, pool: PoolMember, error: BatonError) -> None:
    """Its nodes find out by themselves."""
    del table.knowledge.pools.members[pool.incarnation]
    table.knowledge.left(pool.incarnation)
    table.out.append(Lost(pool.incarnation, pool.info.name, error, expected=False))
