"""Predictions of the latency estimator."""

from baton.errors import DeadlineExceeded
from baton.types import NodeName
from coordinator.core.estimates.cost_model import CostModel, DecodeTimePredictor
from coordinator.core.estimates.workload import OutputLengthPredictor
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.placement.node_loads import NodeLoads
from coordinator.core.placement.request_placer import LatencyEstimator


def test_latency_estimator_finds_hopeless_deadlines() -> None:
    costs = CostModel()
    prospects = LatencyEstimator(
        NodeRegistry(1.0, 1.0), NodeLoads(), costs, DecodeTimePredictor(OutputLengthPredictor())
    )
    assert prospects.find_deadline_error(10_000, 0, 0.001) is None, "nothing is known yet"
    for _ in range(50):
        costs.record_prefill(NodeName("p0"), 1000, 0, 1.0)
    assert isinstance(prospects.find_deadline_error(1000, 0, 0.4), DeadlineExceeded)
    assert prospects.find_deadline_error(1000, 0, 0.6) is None
    assert prospects.find_deadline_error(1000, 900, 0.4) is None, "a cache has most of it"
