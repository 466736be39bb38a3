"""Finds another host's pool that has more of a prompt than a node's own host.

The node is told with its order, so that its pool can fetch the blocks instead of computing them. It
is a hint, as everything from the prefix directory.
"""

from collections.abc import Iterable, Mapping

from baton.types import Incarnation
from coordinator.core.membership.pool_registry import PoolMember

MIN_EXTRA_BLOCKS = 4  # below this the request to the pool costs more than it saves


def best_remote_pool(
    found: Mapping[Incarnation, int], pools: Iterable[PoolMember], host: str, here: int
) -> tuple[PoolMember, int] | None:
    """Return the pool of another host with the most blocks of a prompt, and how many.

    None unless it has MIN_EXTRA_BLOCKS more than `here`, the blocks on `host`. Of equal pools the
    one that joined first is chosen.
    """
    there = [
        (found.get(pool.incarnation, 0), -pool.joined_at, pool)
        for pool in pools
        if pool.info.host_id != host
    ]
    if not there:
        return None
    blocks, _, pool = max(there, key=lambda one: one[:2])
    return (pool, blocks) if blocks - here >= MIN_EXTRA_BLOCKS else None
