"""The parts that placement consists of, as one value that others are given."""

from dataclasses import dataclass

from coordinator.core.admission.admission_controller import AdmissionController
from coordinator.core.admission.degradation import DegradationController
from coordinator.core.membership.node_registry import ContextCapacity
from coordinator.core.placement.breakers import CircuitBreakers
from coordinator.core.placement.node_loads import NodeLoads
from coordinator.core.placement.placement_state import PlacementState
from coordinator.core.placement.request_placer import LatencyEstimator, RequestPlacer


@dataclass(frozen=True, slots=True)
class PlacementServices:
    """What decides whether and where a request is placed."""

    loads: NodeLoads  # what is placed on each node
    state: PlacementState  # learned costs and cached prefixes
    capacity: ContextCapacity  # how long a request may be
    latency_estimator: LatencyEstimator
    degradation: DegradationController
    admission: AdmissionController
    breakers: CircuitBreakers
    placer: RequestPlacer
