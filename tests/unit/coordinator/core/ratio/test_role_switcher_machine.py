"""The ratio under anything: targets that change, nodes that switch late, die and come back in their
first role, probes that fail, requests all the while. Whatever happens, no request is lost or served
wrongly, changes of role never take the last node in service of a role that the target has, and in
the end the nodes are as asked."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.errors import InvalidRequest, Overloaded
from baton.types import NodeName, RequestId, Role
from coordinator.core.common.effects import FinishedResult
from coordinator.core.ratio.role_switch import RoleSwitchPhase
from simulator.decode_batch import SIMULATED_TOKEN
from tests.unit.coordinator.core.ratio.manual_cluster import ManualCluster

NAMES = ("d0", "d1", "d2", "p0", "p1")
names = st.sampled_from(NAMES)


class RoleSwitcherMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cluster = ManualCluster(*NAMES)
        self.submitted: dict[RequestId, int] = {}

    @rule(
        prefill=st.integers(0, 5),
        decode=st.integers(0, 5),
        patience=st.sampled_from([0.0, 3.0, 1000.0]),
    )
    def set_target(self, prefill: int, decode: int, patience: float) -> None:
        switches = self.cluster.harness.brain.role_switcher
        possible = self.cluster.harness.brain.role_switcher.roles.list_possible_splits()
        before = (switches.target_split, switches.target_generation, self.cluster.switch_phases())
        try:
            self.cluster.set_ratio(prefill, decode, patience)
            assert switches.target_split in possible
        except InvalidRequest:
            assert (
                switches.target_split,
                switches.target_generation,
                self.cluster.switch_phases(),
            ) == before

    @rule(tokens=st.integers(1, 12))
    def submit_request(self, tokens: int) -> None:
        try:
            self.submitted[self.cluster.submit_request(tokens)] = tokens
        except Overloaded:
            return

    @rule()
    def generate_tokens(self) -> None:
        self.cluster.generate_tokens()

    @rule(name=names)
    def rejoin_ordered_node(self, name: str) -> None:
        member = self.cluster.nodes.get(name)
        if member is not None and member.ordered_role is not None:
            self.cluster.rejoin_in_ordered_role(name)

    @rule(name=names)
    def kill_node(self, name: str) -> None:
        if name in self.cluster.nodes:
            self.cluster.kill_node(name)

    @rule(name=names, beat=st.booleans())
    def restart_node(self, name: str, beat: bool) -> None:
        if name not in self.cluster.nodes:
            self.cluster.start_node(name, beat=beat)

    @rule(name=names)
    def send_heartbeat(self, name: str) -> None:
        if name in self.cluster.nodes:
            self.cluster.send_heartbeat(name)

    @precondition(lambda self: self.cluster.harness.brain.role_switcher.pending)
    @rule()
    def fail_probes(self) -> None:
        for name in self.cluster.switch_phases():
            self.cluster.fail_probe(name)

    @rule(seconds=st.floats(0.0, 40.0))
    def advance_time(self, seconds: float) -> None:
        self.cluster.advance_clock(seconds)
        live = {node.info.name for node in self.cluster.harness.brain.node_registry.nodes.values()}
        self.cluster.nodes = {
            name: member for name, member in self.cluster.nodes.items() if name in live
        }

    @invariant()
    def switching_nodes_are_out_of_service(self) -> None:
        brain = self.cluster.harness.brain
        for name, flip in brain.role_switcher.pending.items():
            assert name in brain.node_registry.switching_drains
            node = brain.node_registry.by_name(name)
            assert node is not None or flip.phase is RoleSwitchPhase.ORDERED
            assert node is None or flip.incarnation == node.incarnation
            assert str(name) not in self.cluster.names_in_service(
                Role.PREFILL
            ) | self.cluster.names_in_service(Role.DECODE)
        assert all(
            name in brain.role_switcher.pending
            for name in map(NodeName, NAMES)
            if name in brain.node_registry.switching_drains
        )

    @invariant()
    def unserved_target_role_has_no_draining_node(self) -> None:
        """While nobody serves a role of the target, no node that has the role is draining."""
        brain = self.cluster.harness.brain
        target = brain.role_switcher.target_split
        if target is None or brain.role_switcher._needs_reconcile:
            return
        for role in Role:
            if target.node_count(role) and not brain.node_registry.has_serving_node(role):
                leaving = [
                    flip
                    for flip in brain.role_switcher.pending.values()
                    if flip.source_role is role
                ]
                assert all(flip.phase is not RoleSwitchPhase.DRAINING for flip in leaving)

    def teardown(self) -> None:
        """All nodes return and none dies any more: every accepted request ends, and the target
        is reached."""
        crew = self.cluster
        for name in NAMES:
            if name not in crew.nodes:
                crew.start_node(name)
        target = crew.harness.brain.role_switcher.target_split
        if target is None or target.total_nodes != len(NAMES):
            crew.set_ratio(2, 3)
        crew.run_until_settled()
        target = crew.harness.brain.role_switcher.target_split
        assert target is not None
        assert (
            len(crew.names_in_service(Role.PREFILL)),
            len(crew.names_in_service(Role.DECODE)),
        ) == (
            target.prefill_nodes,
            target.decode_nodes,
        )
        assert crew.harness.count_placed() == 0
        for request, tokens in self.submitted.items():
            result = crew.harness.end_event(request).result
            sent = crew.harness.emitted_tokens(request)
            assert sent == [SIMULATED_TOKEN] * len(sent)
            if isinstance(result, FinishedResult):
                assert len(sent) == tokens
            else:
                assert result.code in {"unavailable", "deadline_exceeded", "node_gone", "stalled"}


RoleSwitcherMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestRoleSwitcher = pytest.mark.slow(RoleSwitcherMachine.TestCase)
