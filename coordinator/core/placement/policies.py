"""The placement policies by the names that --placement takes."""

from collections.abc import Callable

from coordinator.core.placement.interface import PlacementPolicy
from coordinator.core.placement.prefix_aware import PrefixAwarePolicy
from coordinator.core.placement.simple_policies import LeastLoadedPolicy, RoundRobinPolicy

POLICIES: dict[str, Callable[[], PlacementPolicy]] = {
    "round_robin": RoundRobinPolicy,
    "least_loaded": LeastLoadedPolicy,
    "prefix_aware": PrefixAwarePolicy,
}
