"""Switches the roles of nodes to reach the target split: drain, order, probe, back into service.

The state is soft: a coordinator that restarts has no target and accepts the role that each node
joins in. A node that restarts in its first role while there is a target is switched again.
"""

from collections import Counter, deque
from collections.abc import Callable

from baton.cluster_link.messages import SetRoleOrder
from baton.errors import BatonError, InvalidRequest, NodeDrained, NodeStalled
from baton.role_split import RoleSplit, format_splits, list_possible_splits
from baton.types import FinishReason, NodeName, Role
from coordinator.core.common.effects import EffectLog, PlacementSignal, RoleSwitchReport
from coordinator.core.membership.node_registry import NodeMember, NodeRegistry
from coordinator.core.placement.node_loads import NodeLoads
from coordinator.core.ratio.role_moves import NodeRoleState, opposite_role, plan_role_moves
from coordinator.core.ratio.role_probe import RoleProber
from coordinator.core.ratio.role_switch import (
    ORDER_TIMEOUT_SECONDS,
    PendingRoleSwitch,
    RoleSwitchPhase,
)
from coordinator.core.requests.table import RequestTable

MAX_FINISHED = 64  # reports that are kept
MAX_CONCURRENT = 64  # nodes that switch at the same time
# how long a role may have no node before a node of the other role takes it
UNSTAFFED_SECONDS = 5.0
# seconds before a node whose switch has failed is switched again, doubled with each failure
_MIN_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 1.0, 30.0

DropNode = Callable[[NodeMember, BatonError, float], None]


class NodeRoles:
    """Which role each live node has or is switching to, and the splits that are possible."""

    def __init__(self, registry: NodeRegistry, loads: NodeLoads, mode: str) -> None:
        self.pending: dict[NodeName, PendingRoleSwitch] = {}
        self.backoff_until: dict[NodeName, float] = {}  # nodes whose last switch has failed
        self.mode = mode
        self._registry = registry
        self._loads = loads

    def current_split(self) -> RoleSplit:
        """Return the live nodes by role, without those that are switching."""
        counts = Counter(
            node.info.role
            for node in self._registry.nodes.values()
            if node.info.name not in self.pending and not node.is_leaving
        )
        return RoleSplit(counts[Role.PREFILL], counts[Role.DECODE])

    def projected_split(self) -> RoleSplit:
        """Return the live nodes by the role that they have or are switching to."""
        counts = Counter(state.role for state in self.list_states())
        return RoleSplit(counts[Role.PREFILL], counts[Role.DECODE])

    def list_possible_splits(self) -> list[RoleSplit]:
        """Return the splits that the live nodes and the mode allow."""
        return list_possible_splits(len(self.list_states()), self.mode)

    def list_states(self) -> list[NodeRoleState]:
        """Return the states of all live nodes, and of those that are rejoining in another role."""
        serving = {node.incarnation for node in self._registry.nodes_in_service()}
        present = [
            self._node_state(node, node.incarnation in serving)
            for node in self._registry.nodes.values()
        ]
        rejoining = [
            NodeRoleState(
                switch.node,
                switch.target_role,
                is_serving=False,
                is_switching=True,
                is_locked=True,
            )
            for switch in self.pending.values()
            if self._registry.by_name(switch.node) is None
        ]
        return [*(state for state in present if state is not None), *rejoining]

    def _node_state(self, node: NodeMember, serves: bool) -> NodeRoleState | None:
        """Return the node's state; None if it is leaving the cluster."""
        name, attempts = node.info.name, len(self._loads.attempts_on(node.incarnation))
        switch = self.pending.get(name)
        if switch is not None:
            return NodeRoleState(
                name,
                switch.target_role,
                is_serving=False,
                is_switching=True,
                is_draining=switch.phase is RoleSwitchPhase.DRAINING,
                is_locked=switch.phase is RoleSwitchPhase.ORDERED,
                attempts=attempts,
            )
        if node.is_leaving:
            return None
        locked = name in self.backoff_until or not (serves or name in self._registry.drains)
        return NodeRoleState(
            name, node.info.role, is_serving=serves, is_locked=locked, attempts=attempts
        )


class RoleSwitcher:
    """Inputs only record what has happened; `advance_switches` follows each of them and acts on it
    while `needs_attention`. `drop_node` removes a node from the cluster."""

    def __init__(
        self,
        registry: NodeRegistry,
        table: RequestTable,
        roles: NodeRoles,
        prober: RoleProber,
        loads: NodeLoads,
        effects: EffectLog,
        signal: PlacementSignal,
        drop_node: DropNode,
    ) -> None:
        self.target_split: RoleSplit | None = None
        self.target_generation = 0  # counts the targets
        self.roles = roles
        self.pending = roles.pending
        self.finished: deque[RoleSwitchReport] = deque(maxlen=MAX_FINISHED)
        self.outcome_counts: Counter[tuple[str, str]] = Counter()  # role, outcome
        self.needs_attention = False  # whether `advance_switches` has something to do
        self._registry = registry
        self._table = table
        self._prober = prober
        self._loads = loads
        self._effects = effects
        self._signal = signal
        self._drop_node = drop_node
        self._drain_timeout = 0.0
        self._failures: Counter[NodeName] = Counter()
        # until when a role may stay without a node; None: a node of the other role must take it
        self._unstaffed_until: dict[Role, float | None] = {}
        self._needs_reconcile = False

    # inputs

    def set_target(self, target: RoleSplit, drain_timeout: float) -> None:
        """Replace the target. Attempts that a switching node still has after `drain_timeout`
        seconds are placed again. Raises InvalidRequest for a split that is not possible."""
        possible = self.roles.list_possible_splits()
        if target not in possible:
            raise InvalidRequest(
                f"ratio {target} is not possible with {len(self.roles.list_states())} live nodes"
                f" in mode {self.roles.mode}: possible are {format_splits(possible)}",
                param="ratio",
            )
        self.target_split, self._drain_timeout = target, drain_timeout
        self.target_generation += 1
        self._failures.clear()
        self.roles.backoff_until.clear()
        self._request_reconcile()

    def on_node_joined(self, node: NodeMember, now: float) -> None:
        switch = self.pending.get(node.info.name)
        self._request_reconcile()
        if switch is None:
            return
        if switch.phase is RoleSwitchPhase.ORDERED and node.info.role is switch.target_role:
            switch.mark_joined(node.incarnation, now)
            self._start_probing(switch)
        else:
            self._finish_switch(switch, "lost", now, f"it came back as {node.info.role.value}")

    def on_node_lost(self, node: NodeMember, now: float) -> None:
        """The node's stream has ended; for a node that was ordered to switch this is expected."""
        switch = self.pending.get(node.info.name)
        self._request_reconcile()
        if switch is not None and switch.phase is not RoleSwitchPhase.ORDERED:
            self._finish_switch(
                switch, "lost", now, f"the node was lost while {switch.phase.value}"
            )

    def on_heartbeat(self) -> None:
        """A node has reported: it may be in service now, so another may switch."""
        if self.target_split is not None and not self.is_settled:
            self._request_reconcile()

    def on_service_changed(self) -> None:
        """The set of nodes in service has changed."""
        self._request_reconcile()

    def run_due(self, now: float) -> None:
        for name in self._registry.switching_drains.pop_due(now):
            switch = self.pending[name]
            error = NodeDrained(f"node {name} takes the role {switch.target_role.value}")
            self._table.evacuate_node(switch.incarnation, error, now)
        for switch in [
            switch
            for switch in self.pending.values()
            if switch.due_at is not None and switch.due_at <= now
        ]:
            if switch.phase is RoleSwitchPhase.ORDERED:
                self._give_up_node(switch, now)
            else:
                self._start_probing(switch)
        for name in [name for name, until in self.roles.backoff_until.items() if until <= now]:
            del self.roles.backoff_until[name]
            self._request_reconcile()
        for role in [
            role
            for role, until in self._unstaffed_until.items()
            if until is not None and until <= now
        ]:
            self._unstaffed_until[role] = None
            self._request_reconcile()

    def next_due_at(self) -> float | None:
        dues = (switch.due_at for switch in self.pending.values())
        times = (
            self._registry.switching_drains.next_deadline(),
            *dues,
            *self.roles.backoff_until.values(),
            *self._unstaffed_until.values(),
        )
        return min((time for time in times if time is not None), default=None)

    def advance_switches(self, now: float) -> None:
        """Act on what has happened since the last call."""
        self._handle_probe_results(now)
        if self._needs_reconcile and self.target_split is not None:
            self._reconcile(self.target_split, now)
        for switch in list(self.pending.values()):
            if switch.phase is RoleSwitchPhase.DRAINING and not self._loads.attempts_on(
                switch.incarnation
            ):
                self._order_switch(switch, now)
        for switch in list(self.pending.values()):
            if switch.phase is RoleSwitchPhase.PROBING and switch.probe_request is None:
                self._prober.send_probe(switch, now)
        self.needs_attention = bool(
            self.pending
            or self._prober.has_results
            or (self._needs_reconcile and self.target_split is not None)
        )

    # views

    def expects_disconnect(self, node: NodeMember) -> bool:
        """Return whether the node was ordered to end its stream and rejoin."""
        switch = self.pending.get(node.info.name)
        return (
            switch is not None
            and switch.phase is RoleSwitchPhase.ORDERED
            and switch.incarnation == node.incarnation
        )

    @property
    def is_settled(self) -> bool:
        """Whether the nodes have the target split and no switch is pending."""
        return self.target_split is None or (
            not self.pending and self.roles.current_split() == self.target_split
        )

    # inside

    def _request_reconcile(self) -> None:
        self._needs_reconcile = self.needs_attention = True

    def _reconcile(self, target: RoleSplit, now: float) -> None:
        states = self.roles.list_states()
        for role in Role:
            if target.node_count(role) and all(node.role is not role for node in states):
                self._unstaffed_until.setdefault(role, now + UNSTAFFED_SECONDS)
            else:
                self._unstaffed_until.pop(role, None)
        moves = plan_role_moves(
            target,
            states,
            [role for role, until in self._unstaffed_until.items() if until is None],
        )
        self._needs_reconcile = bool(moves)  # the next input may allow further moves
        for move in moves[: max(0, MAX_CONCURRENT - len(self.pending))]:
            switch = self.pending.get(move.name)
            if switch is not None and switch.phase is RoleSwitchPhase.DRAINING:
                self._finish_switch(switch, "recalled", now)
                continue
            if switch is not None:
                self._finish_switch(switch, "superseded", now)
            node = self._registry.by_name(move.name)
            assert node is not None, "a locked node does not move"
            self._start_switch(node, move.target_role, now)

    def _start_switch(self, node: NodeMember, to: Role, now: float) -> None:
        name = node.info.name
        self.pending[name] = PendingRoleSwitch(
            name, node.incarnation, opposite_role(to), to, self.target_generation, now
        )
        self._registry.switching_drains.start_drain(name, now + self._drain_timeout)
        self._signal.request_pass()

    def _order_switch(self, switch: PendingRoleSwitch, now: float) -> None:
        switch.mark_ordered(now)
        self._registry.switching_drains.start_drain(switch.node, None)
        self._effects.send_order(switch.incarnation, SetRoleOrder(switch.target_role))

    def _give_up_node(self, switch: PendingRoleSwitch, now: float) -> None:
        """The node was ordered to switch and has not rejoined in time."""
        node = self._registry.by_name(switch.node)
        why = (
            f"node {switch.node} did not take the role {switch.target_role.value} within"
            f" {ORDER_TIMEOUT_SECONDS:g} s"
        )
        self._finish_switch(switch, "lost", now, why)
        if node is not None:
            self._drop_node(node, NodeStalled(why), now)

    def _finish_switch(
        self, switch: PendingRoleSwitch, outcome: str, now: float, detail: str = ""
    ) -> None:
        del self.pending[switch.node]
        self._registry.switching_drains.end_drain(switch.node)
        self._prober.cancel_probe(switch, now)
        if outcome == "lost":
            self._failures[switch.node] += 1
            rest = _MIN_BACKOFF_SECONDS * 2.0 ** min(self._failures[switch.node] - 1, 10)
            self.roles.backoff_until[switch.node] = now + min(rest, _MAX_BACKOFF_SECONDS)
        report = switch.build_report(outcome, now, detail)
        self.finished.append(report)
        self.outcome_counts[switch.target_role.value, outcome] += 1
        self._effects.append_effect(report)
        self._signal.request_pass()
        self._request_reconcile()

    # probes

    def _start_probing(self, switch: PendingRoleSwitch) -> None:
        """Let `advance_switches` send the probe: the node is not in all tables yet."""
        switch.phase, switch.probe_request, switch.due_at = RoleSwitchPhase.PROBING, None, None

    def _handle_probe_results(self, now: float) -> None:
        for request, result in self._prober.take_results():
            switch = next(
                (switch for switch in self.pending.values() if switch.probe_request == request),
                None,
            )
            if switch is None:
                continue
            if isinstance(result, FinishReason):
                self._failures.pop(switch.node, None)
                self._finish_switch(switch, "done", now)
            else:
                switch.back_off(f"probe {switch.probe_count} failed: {result.message}", now)
