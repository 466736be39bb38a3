"""Honest nodes for the brain on its bench: they do what they are told, one step at a time, and take
roles in place."""

from dataclasses import dataclass, field

from baton.cluster_link.messages import (
    CancelOrder,
    DecodeOrder,
    DecodeStarted,
    NodeOrder,
    PeerLostNotice,
    PrefillOrder,
    SetRoleOrder,
    TicketOrder,
)
from baton.errors import HandoffFailed
from baton.role_split import RoleSplit
from baton.types import (
    AttemptKey,
    AttemptSpec,
    FinishReason,
    Incarnation,
    NodeName,
    RequestId,
    Role,
)
from coordinator.core.common.effects import SendOrder
from coordinator.core.ratio.role_switch import RoleSwitchPhase
from tests.unit.coordinator.core.brain_harness import BrainHarness

TOKEN = 7


@dataclass
class HonestNode:
    """A node that lives: its role, what it decodes, and the role that it was told to take."""

    incarnation: Incarnation
    role: Role
    streams: dict[AttemptKey, AttemptSpec] = field(default_factory=dict)
    ordered_role: Role | None = None


class HonestCluster:
    def __init__(self, *names: str, mode: str = "disaggregated") -> None:
        """`p...` prefill, all others decode, as under `baton up`."""
        self.harness = BrainHarness(mode=mode, max_queue=64)
        self.nodes: dict[str, HonestNode] = {}
        self.reserved_work: dict[
            AttemptKey, tuple[Incarnation, AttemptSpec]
        ] = {}  # on decode, by the key of the hand-off
        self._executed = 0
        for name in names:
            self.start_node(name)

    # what a test does

    def start_node(self, name: str, role: Role | None = None, *, beat: bool = True) -> None:
        role = role or (Role.PREFILL if name.startswith("p") else Role.DECODE)
        incarnation = self.harness.join_node(name, role)
        self.nodes[name] = HonestNode(incarnation, role)
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
        """The node ends its stream and joins in the role that it was told to take."""
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
        """Every stream gets a token."""
        for member in list(self.nodes.values()):
            for key in list(member.streams):
                if key in member.streams:
                    self._token(member, key)
        self.execute_orders()

    def run_until_settled(self, patience: int = 200) -> None:
        """Let everybody do everything that they were told, until nothing is left to do."""
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
            f" {self.harness.brain.role_switcher.current_split()}"
        )

    def fail_probe(self, name: str, why: str = "by the test") -> None:
        """Who still works on the node's probe, if there is one under way, gives it up."""
        brain = self.harness.brain
        probe = brain.role_switcher.pending[NodeName(name)].probe_request
        record = brain._table.records.get(probe) if probe is not None else None
        if record is not None and record.attempt is not None:
            key = record.attempt.key
            for member in self.nodes.values():
                member.streams.pop(key, None)
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

    def _find_node(self, incarnation: Incarnation) -> HonestNode | None:
        return next((each for each in self.nodes.values() if each.incarnation == incarnation), None)

    def _execute_order(self, member: HonestNode, order: NodeOrder) -> None:
        assert member.ordered_role is None or isinstance(order, PeerLostNotice), (
            "the role is the last thing a node is told"
        )
        me = member.incarnation
        match order:
            case SetRoleOrder(role):
                assert not member.streams, "told to switch with work left"
                member.ordered_role = role
            case DecodeOrder(work, None):
                assert member.role is Role.DECODE
                member.streams[work.key] = work
                self._token(member, work.key)
            case DecodeOrder(work, writer):
                assert member.role is Role.DECODE
                assert writer is not None
                self.reserved_work[work.key] = (me, work)
                self.harness.report_reserved(me, work.key, writer.incarnation)
            case PrefillOrder(work, alone):
                assert member.role is Role.PREFILL
                if alone:
                    self.harness.report_token(
                        me, work.key, len(work.emitted_token_ids), TOKEN, FinishReason.LENGTH
                    )
            case TicketOrder(ticket):
                self._hand_off(me, ticket.key)
            case CancelOrder(key, _):
                member.streams.pop(key, None)
                self.reserved_work.pop(key, None)
            case _:
                pass

    def _hand_off(self, prefill: Incarnation, key: AttemptKey) -> None:
        decode, work = self.reserved_work.pop(key, (None, None))
        target = self._find_node(decode) if decode is not None else None
        if target is None or work is None:
            return
        self.harness.report_prefill_ended(prefill, key)
        target.streams[key] = work
        self.harness.send_from_node(
            target.incarnation, DecodeStarted(key, 0, 0, len(work.context_token_ids))
        )
        self._token(target, key)
        self.harness.report_handed_off(prefill, key)

    def _token(self, member: HonestNode, key: AttemptKey) -> None:
        record = self.harness.brain._table.records.get(key.request_id)
        if record is None:
            member.streams.pop(key, None)
            return
        last = record.remaining_tokens == 1
        if last:
            member.streams.pop(key, None)
        finish = FinishReason.LENGTH if last else None
        self.harness.report_token(
            member.incarnation, key, len(record.emitted_token_ids), TOKEN, finish
        )
