"""Which other host's pool has more of a prompt than a node's own host: told to the node with its
order, so that its pool can fetch the blocks instead of letting the node compute them. A hint, as
all of the directory is."""

from collections.abc import Iterable, Mapping

from baton.types import Incarnation
from coordinator.core.membership.pool_registry import PoolMember

MIN_EXTRA_BLOCKS = 4  # more than there are here: for fewer the asking alone is not worth it


def best_remote_pool(
    found: Mapping[Incarnation, int], pools: Iterable[PoolMember], host: str, here: int
) -> tuple[PoolMember, int] | None:
    """The pool of another host that has the most blocks of a prompt, and how many, if `here` on
    `host` are so many fewer. `found` in blocks; of equal pools the one that joined first."""
    there = [
        (found.get(pool.incarnation, 0), -pool.joined_at, pool)
        for pool in pools
        if pool.info.host_id != host
    ]
    if not there:
        return None
    blocks, _, pool = max(there, key=lambda one: one[:2])
    return (pool, blocks) if blocks - here >= MIN_EXTRA_BLOCKS else None
