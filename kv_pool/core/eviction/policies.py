"""The eviction policies by the names that the setting `pool_eviction` takes."""

from collections.abc import Callable

from kv_pool.core.eviction.cost_evictor import CostEvictor
from kv_pool.core.eviction.evictor import Evictor, LruEvictor

EvictorFactory = Callable[[int, int], Evictor]  # called with num_blocks, block_size

EVICTION_POLICIES: dict[str, EvictorFactory] = {
    "cost": CostEvictor,
    "lru": lambda blocks, tokens: LruEvictor(blocks),
}
