"""Nodes for `BrainHarness` that carry out every order at once and emit tokens when a test asks."""

from dataclasses import dataclass, field

from baton.cluster_link.messages import (
    CancelOrder,
    DecodeOrder,
    DecodeStarted,
    NodeOrder,
    PeerLostNotice,
    PrefillOrder,
    SetRoleOrder,
    StepTokens,
    TicketOrder,
)
from baton.errors import HandoffFailed
from baton.role_split import RoleSplit
from baton.types import (
    AttemptKey,
    FinishReason,
    Incarnation,
    NodeName,
    RequestId,
    Role,
    Ticket,
)
from coordinator.core.common.effects import SendOrder
from coordinator.core.ratio.role_switch import RoleSwitchPhase
from simulator.decode_batch import SIMULATED_TOKEN, DecodeBatch
from tests.unit.coordinator.core.brain_harness import BrainHarness


@dataclass
class ManualNode:
    """A live node: its role, what it decodes, and the role that it was ordered to take."""

    incarnation: Incarnation
    role: Role
    batch: DecodeBatch = field(default_factory=DecodeBatch)
    ordered_role: Role | None = None


class ManualCluster:
    def __init__(self, *names: str, mode: str = "disaggregated") -> None:
        """Nodes named `p...` are prefill nodes, all others decode nodes, as under `baton up`."""
        self.harness = BrainHarness(mode=mode, max_queue=64)
        self.nodes: dict[str, ManualNode] = {}
        self._executed = 0
        for name in names:
            self.start_node(name)

    # what a test does

    def start_node(self, name: str, role: Role | None = None, *, beat: bool = True) -> None:
        role = role or (Role.PREFILL if name.startswith("p") else Role.DECODE)
        incarnation = self.harness.join_node(name, role)
        self.nodes[name] = ManualNode(incarnation, role)
        self.execute_orders()
        if beat:
            self.send_heartbeat(name)

    def send_heartbeat(self, name: str) -> None:
        self.harness.send_heartbeat(self.nodes[name].incarnation)
        self.execute_orders()

    def kill_node(self, name: str) -> None:
        self.harness.lose_node(self.nodes.pop(name).incarnation)
        self.execute_orders()

    def rejoin_in_ordered_role(self, name: str) -> None:
        """The node ends its stream and joins in the role that it was ordered to take."""
        role = self.nodes[name].ordered_role
        assert role is not None
        self.kill_node(name)
        self.start_node(name, role)

    def set_ratio(self, prefill: int, decode: int, patience: float = 5.0) -> None:
        brain = self.harness.brain
        self.harness.effects += brain.set_ratio(
            RoleSplit(prefill, decode), patience, self.harness.now
        )
        self.execute_orders()

    def submit_request(self, max_tokens: int = 3) -> RequestId:
        request = self.harness.submit(max_tokens=max_tokens)
        self.execute_orders()
        return request

    def advance_clock(self, seconds: float) -> None:
        self.harness.advance(seconds)
        self.execute_orders()

    def generate_tokens(self) -> None:
        """Emit one token of every sequence that runs."""
        for member in list(self.nodes.values()):
            for key in list(member.batch.running):
                self._emit_token(member, key)
        self.execute_orders()

    def run_until_settled(self, patience: int = 200) -> None:
        """Carry out orders, send heartbeats and emit tokens until nothing is left to do."""
        for _ in range(patience):
            for name in [name for name, member in self.nodes.items() if member.ordered_role]:
                self.rejoin_in_ordered_role(name)
            for name in list(self.nodes):
                self.send_heartbeat(name)
            self.generate_tokens()
            if (
                self.harness.brain.role_switcher.is_settled
                and not self.harness.brain.running_requests
                and not self.harness.brain.queued_requests
            ):
                return
            self.advance_clock(0.5)
        raise AssertionError(
            f"not settled: {self.switch_phases()},"
            f" {self.harness.brain.role_switcher.roles.current_split()}"
        )

    def fail_probe(self, name: str, why: str = "by the test") -> None:
        """Fail the node's probe, if one is running."""
        brain = self.harness.brain
        probe = brain.role_switcher.pending[NodeName(name)].probe_request
        record = brain.parts.table.records.get(probe) if probe is not None else None
        if record is not None and record.attempt is not None:
            key = record.attempt.key
            for member in self.nodes.values():
                member.batch.cancel_sequence(key)
            self.harness.report_failure(min(record.attempt.legs), key, HandoffFailed(why))
            self.execute_orders()

    def switch_phases(self) -> dict[str, RoleSwitchPhase]:
        return {
            str(name): flip.phase for name, flip in self.harness.brain.role_switcher.pending.items()
        }

    def names_in_service(self, role: Role) -> set[str]:
        return {
            str(node.info.name)
            for node in self.harness.brain.node_registry.nodes_in_service()
            if node.info.role is role
        }

    def count_attempts(self, name: str) -> int:
        return self.harness.brain.count_attempts(self.nodes[name].incarnation)

    # obeying

    def execute_orders(self) -> None:
        while self._executed < len(self.harness.effects):
            effect = self.harness.effects[self._executed]
            self._executed += 1
            if isinstance(effect, SendOrder):
                member = self._find_node(effect.incarnation)
                if member is not None:
                    self._execute_order(member, effect.order)

    def _find_node(self, incarnation: Incarnation) -> ManualNode | None:
        return next((each for each in self.nodes.values() if each.incarnation == incarnation), None)

    def _execute_order(self, member: ManualNode, order: NodeOrder) -> None:
        assert member.ordered_role is None or isinstance(order, PeerLostNotice), (
            "the role is the last thing a node is told"
        )
        me = member.incarnation
        match order:
            case SetRoleOrder(role):
                assert not member.batch.running, "told to switch with work left"
                member.ordered_role = role
            case DecodeOrder(work, None):
                assert member.role is Role.DECODE
                member.batch.start_sequence(work)
                self._emit_token(member, work.key)
            case DecodeOrder(work, writer):
                assert member.role is Role.DECODE
                assert writer is not None
                member.batch.reserve_sequence(work)
                self.harness.report_reserved(me, work.key, writer.incarnation)
            case PrefillOrder(work, alone):
                assert member.role is Role.PREFILL
                if alone:
                    self.harness.report_token(
                        me,
                        work.key,
                        len(work.emitted_token_ids),
                        SIMULATED_TOKEN,
                        FinishReason.LENGTH,
                    )
            case TicketOrder(ticket):
                self._hand_off(me, ticket)
            case CancelOrder(key, _):
                member.batch.cancel_sequence(key)
            case _:
                pass

    def _hand_off(self, prefill: Incarnation, ticket: Ticket) -> None:
        key, target = ticket.key, self._find_node(ticket.decode_peer.incarnation)
        work = target.batch.start_reserved(key) if target is not None else None
        if target is None or work is None:
            return
        self.harness.report_prefill_ended(prefill, key)
        self.harness.send_from_node(
            target.incarnation, DecodeStarted(key, 0, 0, len(work.context_token_ids))
        )
        self._emit_token(target, key)
        self.harness.report_handed_off(prefill, key)

    def _emit_token(self, member: ManualNode, key: AttemptKey) -> None:
        events = member.batch.emit_tokens([key])
        if events:
            self.harness.send_from_node(member.incarnation, StepTokens(events))
