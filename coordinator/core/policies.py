"""The placement policies by the names that --placement takes."""

from collections.abc import Callable

from coordinator.core.placement import PlacementPolicy
from coordinator.core.prefix_aware import PrefixAwarePolicy
from coordinator.core.simple_policies import LeastLoadedPolicy, RoundRobinPolicy

POLICIES: dict[str, Callable[[], PlacementPolicy]] = {
    "round_robin": RoundRobinPolicy,
    "least_loaded": LeastLoadedPolicy,
    "prefix_aware": PrefixAwarePolicy,
}
