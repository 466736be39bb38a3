"""What a request needs for its next attempt, and which nodes it may be offered."""

from typing import Literal

from baton.types import Role
from coordinator.core.loads import Loads
from coordinator.core.placement import Demand, NodeView
from coordinator.core.record import Record
from coordinator.core.registry import Registry

Mode = Literal["disaggregated", "colocated", "auto"]


def demand_of(record: Record, registry: Registry, mode: Mode) -> Demand:
    """The last token of an output needs no decode node where there is prefill. Only while nodes are here."""
    prefill = mode == "disaggregated" or (mode == "auto" and _may_prefill(record, registry))
    block_size = registry.block_size()
    tokens = record.context_tokens + min(record.remaining, block_size)
    return Demand(
        tokens=record.context_tokens,
        blocks=-(-tokens // block_size),
        prefill=prefill,
        decode=not prefill or record.remaining > 1,
        avoid=record.avoid,
        holder=record.holder,
    )


def offered(record: Record, registry: Registry, loads: Loads, in_service: list[NodeView]) -> list[NodeView]:
    """Nodes in service; for a probe its own node as the only one of its role."""
    if record.pin is None:
        return in_service
    node = registry.nodes.get(record.pin)
    if node is None:
        return []
    return [*(view for view in in_service if view.role is not node.info.role), loads.view(node)]


def _may_prefill(record: Record, registry: Registry) -> bool:
    pinned = registry.nodes.get(record.pin) if record.pin else None
    return bool(registry.serving(Role.PREFILL)) or (pinned is not None and pinned.info.role is Role.PREFILL)
