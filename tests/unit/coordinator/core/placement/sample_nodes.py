"""Node views and a demand from which tests of placement vary."""

from dataclasses import replace

from baton.types import Incarnation, NodeName
from coordinator.core.estimates.cost_model import CostModel
from coordinator.core.placement.interface import PlacementContext
from coordinator.core.placement.node_loads import NodeView, PlacementDemand
from tests.unit.coordinator.core.brain_harness import DECODE, PREFILL

NOW = 1000.0
P = NodeView(Incarnation("p"), PREFILL, 64, 512, 0, 0, 0, 4096, None, 0)
D = NodeView(Incarnation("d"), DECODE, 64, 512, 0, 0, 0, 4096, None, 0)
DEMAND = PlacementDemand(
    context_tokens=1024,
    blocks=65,
    needs_prefill=True,
    needs_decode=True,
    expected_output_tokens=100.0,
)


def placement_context(now: float = NOW) -> PlacementContext:
    return PlacementContext(now, CostModel(), 1.0, token_bytes=1024)


def named_view(view: NodeView, name: str, **changes: object) -> NodeView:
    named = replace(view, incarnation=Incarnation(name), name=NodeName(name))
    return replace(named, **changes)  # type: ignore[arg-type]
