"""The eviction policies by the names that settings have for them."""

from collections.abc import Callable

from kv_pool.core.cost_eviction import CostEviction
from kv_pool.core.eviction import Evictor, Lru

Eviction = Callable[[int, int], Evictor]  # for so many blocks of so many tokens

POLICIES: dict[str, Eviction] = {"cost": CostEviction, "lru": lambda blocks, tokens: Lru(blocks)}
