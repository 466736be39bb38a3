"""The eviction policies by the names that settings have for them."""

from collections.abc import Callable

from kv_pool.core.eviction.cost_evictor import CostEvictor
from kv_pool.core.eviction.evictor import Evictor, LruEvictor

EvictorFactory = Callable[[int, int], Evictor]  # for so many blocks of so many tokens

EVICTION_POLICIES: dict[str, EvictorFactory] = {
    "cost": CostEvictor,
    "lru": lambda blocks, tokens: LruEvictor(blocks),
}
