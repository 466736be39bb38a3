"""Switches the roles of nodes to reach the target split: drain, order, probe, back into service.

The state is soft: a coordinator that restarts has no target and accepts the role that each node
joins in. A node that restarts in its first role while there is a target is switched again.
"""

from collections import Counter, deque
from collections.abc import Callable

from baton.cluster_link.messages import SetRoleOrder
from baton.errors import BatonError, Cancelled, InvalidRequest, NodeDrained, NodeStalled
from baton.role_split import RoleSplit, format_splits, list_possible_splits
from baton.types import FinishReason, NodeName, Request, RequestId, Role, SamplingParams
from coordinator.core.admission.tenants import INTERNAL_PRINCIPAL
from coordinator.core.common.effects import RoleSwitchReport
from coordinator.core.membership.node_registry import NodeMember, NodeRegistry
from coordinator.core.ratio.role_moves import NodeRoleState, opposite_role, plan_role_moves
from coordinator.core.ratio.role_switch import (
    ORDER_TIMEOUT_SECONDS,
    PROBE_TIMEOUT_SECONDS,
    PendingRoleSwitch,
    RoleSwitchPhase,
)
from coordinator.core.requests.table import RequestTable

MAX_FINISHED = 64  # reports that are kept
MAX_CONCURRENT = 64  # nodes that switch at the same time
# that a role may have no node before one of the other role takes it
UNSTAFFED_SECONDS = 5.0
_MIN_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = (
    1.0,
    30.0,
)  # seconds after a change of a node that failed
_PROBE_OUTPUT_TOKENS = 2  # one by prefill, one by decode
_PROBE_BLOCKS = 2

DropNode = Callable[[NodeMember, BatonError, float], None]


class RoleSwitcher:
    """Inputs only record what has happened; `advance_switches` follows each of them and acts on it.
    `drop` removes a node from the cluster."""

    def __init__(
        self, registry: NodeRegistry, table: RequestTable, mode: str, drop: DropNode
    ) -> None:
        self.target_split: RoleSplit | None = None
        self.target_generation = 0  # counts the targets
        self.pending: dict[NodeName, PendingRoleSwitch] = {}
        self.finished: deque[RoleSwitchReport] = deque(maxlen=MAX_FINISHED)
        self.outcome_counts: Counter[tuple[str, str]] = Counter()  # role, outcome
        self._registry = registry
        self._table = table
        self._mode = mode
        self._drop_node = drop
        self._drain_timeout = 0.0
        self._failures: Counter[NodeName] = Counter()
        self._backoff_until: dict[NodeName, float] = {}
        self._unstaffed_until: dict[
            Role, float | None
        ] = {}  # roles that nobody has: how long that is borne, None: no longer
        self._needs_reconcile = False

    # inputs

    def set_target(self, target: RoleSplit, patience: float, now: float) -> None:
        """Replace the target. What a node still does after `patience` seconds is placed again.
        Raises InvalidRequest for a split that is not possible."""
        nodes = len(self._role_states(now))
        possible = list_possible_splits(nodes, self._mode)
        if target not in possible:
            raise InvalidRequest(
                f"ratio {target} is not possible with {nodes} live nodes in mode {self._mode}: "
                f"possible are {format_splits(possible)}",
                param="ratio",
            )
        self.target_split, self._drain_timeout = target, patience
        self.target_generation += 1
        self._failures.clear()
        self._backoff_until.clear()
        self._needs_reconcile = True

    def on_node_joined(self, node: NodeMember, now: float) -> None:
        flip = self.pending.get(node.info.name)
        self._needs_reconcile = True
        if flip is None:
            return
        if flip.phase is RoleSwitchPhase.ORDERED and node.info.role is flip.target_role:
            flip.mark_joined(node.incarnation, now)
            self._start_probing(flip)
        else:
            self._finish_switch(flip, "lost", now, f"it came back as {node.info.role.value}")

    def on_node_lost(self, node: NodeMember, now: float) -> None:
        """The node's stream has ended; for a node that was ordered to switch this is expected."""
        flip = self.pending.get(node.info.name)
        self._needs_reconcile = True
        if flip is not None and flip.phase is not RoleSwitchPhase.ORDERED:
            self._finish_switch(flip, "lost", now, f"the node was lost while {flip.phase.value}")

    def on_heartbeat(self) -> None:
        """A node has reported: it may be in service now, so another may switch."""
        self._needs_reconcile |= self.target_split is not None and not self.is_settled

    def on_service_changed(self) -> None:
        """The set of nodes in service has changed."""
        self._needs_reconcile = True

    def run_due(self, now: float) -> None:
        for name in self._registry.switching_drains.pop_due(now):
            flip = self.pending[name]
            error = NodeDrained(f"node {name} takes the role {flip.target_role.value}")
            self._table.evacuate_node(flip.incarnation, error, now)
        for flip in [
            flip for flip in self.pending.values() if flip.due_at is not None and flip.due_at <= now
        ]:
            if flip.phase is RoleSwitchPhase.ORDERED:
                self._give_up_node(flip, now)
            else:
                self._start_probing(flip)
        for name in [name for name, until in self._backoff_until.items() if until <= now]:
            del self._backoff_until[name]
            self._needs_reconcile = True
        for role in [
            role
            for role, until in self._unstaffed_until.items()
            if until is not None and until <= now
        ]:
            self._unstaffed_until[role] = None
            self._needs_reconcile = True

    def next_due_at(self) -> float | None:
        dues = (flip.due_at for flip in self.pending.values())
        times = (
            self._registry.switching_drains.next_deadline(),
            *dues,
            *self._backoff_until.values(),
            *self._unstaffed_until.values(),
        )
        return min((time for time in times if time is not None), default=None)

    def advance_switches(self, now: float) -> None:
        """Act on what has happened since the last call."""
        if self._table.ended_probes:
            self._handle_probe_results(now)
        if not (self.pending or self._needs_reconcile):
            return
        if self._needs_reconcile and self.target_split is not None:
            self._reconcile(self.target_split, now)
        for flip in [
            flip for flip in self.pending.values() if flip.phase is RoleSwitchPhase.DRAINING
        ]:
            if not self._table.loads.attempts_on(flip.incarnation):
                self._order_switch(flip, now)
        for flip in [
            flip
            for flip in self.pending.values()
            if flip.phase is RoleSwitchPhase.PROBING and flip.probe_request is None
        ]:
            self._send_probe(flip, now)

    # views

    def expects_disconnect(self, node: NodeMember) -> bool:
        """Return whether the node was ordered to end its stream and rejoin."""
        flip = self.pending.get(node.info.name)
        return (
            flip is not None
            and flip.phase is RoleSwitchPhase.ORDERED
            and flip.incarnation == node.incarnation
        )

    @property
    def is_settled(self) -> bool:
        """Whether the nodes have the target split and no switch is pending."""
        have = self.current_split()
        return self.target_split is None or (not self.pending and have == self.target_split)

    def current_split(self) -> RoleSplit:
        """Return the live nodes by role, without those that are switching."""
        still = [
            node for node in self._registry.nodes.values() if node.info.name not in self.pending
        ]
        have = Counter(node.info.role for node in still if not node.is_leaving)
        return RoleSplit(have[Role.PREFILL], have[Role.DECODE])

    def projected_split(self, now: float) -> RoleSplit:
        """Return the live nodes by the role that they have or are switching to."""
        bound = Counter(standing.role for standing in self._role_states(now))
        return RoleSplit(bound[Role.PREFILL], bound[Role.DECODE])

    def list_possible_splits(self, now: float) -> list[RoleSplit]:
        return list_possible_splits(len(self._role_states(now)), self._mode)

    # inside

    def _reconcile(self, target: RoleSplit, now: float) -> None:
        standings = self._role_states(now)
        for role in Role:
            if target.node_count(role) and all(node.role is not role for node in standings):
                self._unstaffed_until.setdefault(role, now + UNSTAFFED_SECONDS)
            else:
                self._unstaffed_until.pop(role, None)
        wanted = plan_role_moves(
            target,
            standings,
            [role for role, until in self._unstaffed_until.items() if until is None],
        )
        self._needs_reconcile = bool(wanted)  # what follows from it is seen at the next input
        for move in wanted[: max(0, MAX_CONCURRENT - len(self.pending))]:
            flip = self.pending.get(move.name)
            if flip is not None and flip.phase is RoleSwitchPhase.DRAINING:
                self._finish_switch(flip, "recalled", now)
                continue
            if flip is not None:
                self._finish_switch(flip, "superseded", now)
            node = self._registry.by_name(move.name)
            assert node is not None, "what is fixed does not move"
            self._start_switch(node, move.target_role, now)

    def _role_states(self, now: float) -> list[NodeRoleState]:
        serving = {node.incarnation for node in self._registry.nodes_in_service()}
        found = [
            self._role_state(node, node.incarnation in serving)
            for node in self._registry.nodes.values()
        ]
        away = [flip for flip in self.pending.values() if self._registry.by_name(flip.node) is None]
        return [
            *(standing for standing in found if standing is not None),
            *(
                NodeRoleState(
                    flip.node, flip.target_role, is_serving=False, is_switching=True, is_locked=True
                )
                for flip in away
            ),
        ]

    def _role_state(self, node: NodeMember, serves: bool) -> NodeRoleState | None:
        """Return the node's state; None if it is leaving the cluster."""
        name, load = node.info.name, len(self._table.loads.attempts_on(node.incarnation))
        flip = self.pending.get(name)
        if flip is not None:
            leaving, fixed = (
                flip.phase is RoleSwitchPhase.DRAINING,
                flip.phase is RoleSwitchPhase.ORDERED,
            )
            return NodeRoleState(
                name,
                flip.target_role,
                is_serving=False,
                is_switching=True,
                is_draining=leaving,
                is_locked=fixed,
                attempts=load,
            )
        if node.is_leaving:
            return None
        fixed = name in self._backoff_until or not (serves or name in self._registry.drains)
        return NodeRoleState(
            name, node.info.role, is_serving=serves, is_locked=fixed, attempts=load
        )

    def _start_switch(self, node: NodeMember, to: Role, now: float) -> None:
        name = node.info.name
        self.pending[name] = PendingRoleSwitch(
            name, node.incarnation, opposite_role(to), to, self.target_generation, now
        )
        self._registry.switching_drains.start_drain(name, now + self._drain_timeout)
        self._table.wake_placement()

    def _order_switch(self, flip: PendingRoleSwitch, now: float) -> None:
        flip.mark_ordered(now)
        self._registry.switching_drains.start_drain(flip.node, None)
        self._table.effects.send_order(flip.incarnation, SetRoleOrder(flip.target_role))

    def _give_up_node(self, flip: PendingRoleSwitch, now: float) -> None:
        """The node was ordered to switch and has not rejoined in time."""
        node = self._registry.by_name(flip.node)
        why = (
            f"node {flip.node} did not take the role {flip.target_role.value} within"
            f" {ORDER_TIMEOUT_SECONDS:g} s"
        )
        self._finish_switch(flip, "lost", now, why)
        if node is not None:
            self._drop_node(node, NodeStalled(why), now)

    def _finish_switch(
        self, flip: PendingRoleSwitch, outcome: str, now: float, detail: str = ""
    ) -> None:
        del self.pending[flip.node]
        self._registry.switching_drains.end_drain(flip.node)
        probe = (
            self._table.records.get(flip.probe_request) if flip.probe_request is not None else None
        )
        if probe is not None:
            self._table.end_request(probe, Cancelled("the node is not to be probed any more"), now)
        if outcome == "lost":
            self._failures[flip.node] += 1
            rest = _MIN_BACKOFF_SECONDS * 2.0 ** min(self._failures[flip.node] - 1, 10)
            self._backoff_until[flip.node] = now + min(rest, _MAX_BACKOFF_SECONDS)
        report = flip.build_report(outcome, now, detail)
        self.finished.append(report)
        self.outcome_counts[flip.target_role.value, outcome] += 1
        self._table.effects.append_effect(report)
        self._table.wake_placement()
        self._needs_reconcile = True

    # probes

    def _start_probing(self, flip: PendingRoleSwitch) -> None:
        """Have `advance_switches` send the probe: the node is not in all books yet."""
        flip.phase, flip.probe_request, flip.due_at = RoleSwitchPhase.PROBING, None, None

    def _send_probe(self, flip: PendingRoleSwitch, now: float) -> None:
        """Send a salted prompt of more than a block, so that no cache has it: it must be computed,
        and handed off if the mode has hand-offs. A new prefill node answers alone if no decode node
        has room: it is needed all the same, and no decode node could take the hand-off."""
        model = self._registry.model_identity
        assert model is not None, "a node has joined"
        smallest = min(node.info.max_context_tokens for node in self._registry.nodes.values())
        request = RequestId(f"probe-{flip.incarnation}-{flip.probe_count}")
        length = max(1, min(model.layout.block_size + 1, smallest - _PROBE_OUTPUT_TOKENS))
        prompt = tuple(token % model.vocab_size for token in range(1, length + 1))
        alone = flip.target_role is Role.PREFILL and self._table.latency_estimator.is_decode_full(
            blocks=_PROBE_BLOCKS
        )
        sampling = SamplingParams(
            1 if alone else _PROBE_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True
        )
        flip.start_probe(request)
        probe = Request(
            request,
            prompt,
            sampling,
            PROBE_TIMEOUT_SECONDS,
            cache_salt=request.encode(),
            principal=INTERNAL_PRINCIPAL,
        )
        self._table.add_probe(probe, flip.incarnation, now)

    def _handle_probe_results(self, now: float) -> None:
        probed, self._table.ended_probes = self._table.ended_probes, []
        for request, result in probed:
            flip = next(
                (flip for flip in self.pending.values() if flip.probe_request == request), None
            )
            if flip is None:
                continue
            if isinstance(result, FinishReason):
                self._failures.pop(flip.node, None)
                self._finish_switch(flip, "done", now)
            else:
                flip.back_off(f"probe {flip.probe_count} failed: {result.message}", now)
