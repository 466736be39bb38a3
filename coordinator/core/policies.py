"""The placement policies by the names that --placement takes."""

from collections.abc import Callable

from coordinator.core.placement import Placement
from coordinator.core.prefix_aware import PrefixAware
from coordinator.core.simple_policies import LeastLoaded, RoundRobin

POLICIES: dict[str, Callable[[], Placement]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix_aware": PrefixAware,
}
