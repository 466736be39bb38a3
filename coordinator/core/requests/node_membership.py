"""Adds nodes to the cluster, takes them out of service, and removes them."""

from typing import Protocol

from baton.cluster_link.messages import JoinInfo, PeerLostNotice
from baton.errors import BatonError, NodeDrained, NodeLost, NotFound
from baton.types import Incarnation, NodeName
from coordinator.core.common.counters import Counters
from coordinator.core.common.effects import EffectLog, MemberLost, PlacementSignal
from coordinator.core.membership.node_registry import (
    NodeMember,
    NodeRegistry,
    NodeServiceState,
    is_node_empty,
)
from coordinator.core.placement.services import PlacementServices
from coordinator.core.requests.model_change import count_bound_requests, end_requests_of_model
from coordinator.core.requests.table import RequestTable


class NodeListener(Protocol):
    """Is notified of nodes that join, leave or change their service state."""

    def on_node_joined(self, node: NodeMember, now: float) -> None: ...

    def on_node_lost(self, node: NodeMember, now: float) -> None: ...

    def on_service_changed(self) -> None: ...

    def expects_disconnect(self, node: NodeMember) -> bool: ...


class NodeMembership:
    """Keeps the node registry, placement and the request table consistent."""

    def __init__(
        self,
        registry: NodeRegistry,
        table: RequestTable,
        placement: PlacementServices,
        role_switcher: NodeListener,
        *,
        counters: Counters,
        effects: EffectLog,
        signal: PlacementSignal,
    ) -> None:
        self._registry = registry
        self._table = table
        self._placement = placement
        self._role_switcher = role_switcher
        self._counters = counters
        self._effects = effects
        self._signal = signal

    def join_node(self, info: JoinInfo, incarnation: Incarnation, now: float) -> None:
        """Add a node, in place of an older incarnation of its process. Raises ConfigError, counted:
        see `NodeRegistry.check_join`. The first node of another model ends the requests that were
        admitted under the former one."""
        try:
            replaced = self._registry.check_join(
                info, now, count_bound_requests(self._table.records.values())
            )
        except BatonError:
            self._counters.joins["refused"] += 1
            raise
        if replaced is not None:
            self.drop_node(replaced, NodeLost(f"node {info.name} has joined anew"), now)
        former_model = self._registry.model_digest
        node = self._registry.add_node(info, incarnation, now)
        if former_model != node.model_digest:
            end_requests_of_model(self._table, former_model, now)
        self._placement.capacity.on_node_joined(info)
        self._placement.state.add_node(node)
        self._placement.loads.add_node(incarnation)
        self._role_switcher.on_node_joined(node, now)
        self._signal.request_pass()
        self._counters.joins["joined"] += 1

    def drop_node(self, node: NodeMember, error: BatonError, now: float) -> None:
        """Remove a member, tell the other nodes, and replace its attempts."""
        self._registry.remove_node(node.incarnation)
        self._placement.capacity.on_node_left(node.info, now)
        self._signal.request_pass()  # what waits for a prefill node may go on without one
        self._placement.state.remove_node(node.incarnation)
        is_expected = self._role_switcher.expects_disconnect(node)
        if not is_expected:
            self._counters.lost_nodes[error.code] += 1
        self._effects.append_effect(
            MemberLost(node.incarnation, node.info.name, error, is_expected)
        )
        for other in self._registry.nodes:
            self._effects.send_order(other, PeerLostNotice(node.incarnation))
        self._table.on_node_lost(node.incarnation, error, now)
        self._role_switcher.on_node_lost(node, now)

    def drop_expired_nodes(self, now: float) -> None:
        """Remove nodes that are silent, or that have attempts and make no progress."""
        for node, error in self._registry.find_expired(now, self.count_attempts):
            self.drop_node(node, error, now)
        self._placement.capacity.expire_departed_nodes(now)

    def start_drain(self, name: NodeName, until: float | None) -> None:
        """Give the node no new work; at `until` what it still has is replaced. Raises NotFound."""
        self.get_node(name)
        self._registry.drains.start_drain(name, until)
        self._on_service_changed()

    def end_drain(self, name: NodeName) -> None:
        """Put a node back in service, if it is not. Raises NotFound for an unknown name."""
        if not self._registry.drains.end_drain(name):
            self.get_node(name)
        self._on_service_changed()

    def evacuate_due_drains(self, now: float) -> None:
        """Replace the attempts on drained nodes whose time is over."""
        for name in self._registry.drains.pop_due(now):
            node = self._registry.by_name(name)
            if node is not None:
                error = NodeDrained(f"node {name} is being drained")
                self._table.evacuate_node(node.incarnation, error, now)

    def get_node(self, name: NodeName) -> NodeMember:
        """Raises NotFound, naming the nodes that there are."""
        node = self._registry.by_name(name)
        if node is None:
            names = sorted(node.info.name for node in self._registry.nodes.values())
            raise NotFound(
                f"there is no node {name[:64]!r}: nodes are {', '.join(names) or 'none'}",
                param="node",
            )
        return node

    def count_attempts(self, node: Incarnation) -> int:
        """Count the attempts that have a leg on the node."""
        return len(self._placement.loads.attempts_on(node))

    def get_service_state(self, node: NodeMember) -> NodeServiceState:
        """Return whether the node is given new work, and if not, whether it still has some."""
        if node.info.name not in self._registry.drains:
            return (
                NodeServiceState.SWITCHING
                if node.info.name in self._registry.switching_drains
                else NodeServiceState.IN_SERVICE
            )
        is_empty = is_node_empty(
            self.count_attempts(node.incarnation),
            self._placement.loads.count_quiet_reports(node.incarnation),
            node.stats,
        )
        return NodeServiceState.DRAINED if is_empty else NodeServiceState.DRAINING

    def _on_service_changed(self) -> None:
        self._signal.request_pass()
        self._role_switcher.on_service_changed()
