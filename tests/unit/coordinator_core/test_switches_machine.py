"""The ratio under anything: targets that change, nodes that switch late, die and come back in their first role, probes
that fail, requests all the while. Whatever happens, no request is lost or served wrongly, changes of role never take
the last node in service of a role that the target has, and in the end the nodes are as asked."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.errors import InvalidRequest, Overloaded
from baton.types import RequestId, Role
from coordinator.core import messages as m
from coordinator.core.flip import Phase
from tests.unit.coordinator_core.crew import TOKEN, Crew

NAMES = ("d0", "d1", "d2", "p0", "p1")
names = st.sampled_from(NAMES)


class SwitchesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.crew = Crew(*NAMES)
        self.asked: dict[RequestId, int] = {}

    @rule(prefill=st.integers(0, 5), decode=st.integers(0, 5), patience=st.sampled_from([0.0, 3.0, 1000.0]))
    def a_target(self, prefill: int, decode: int, patience: float) -> None:
        switches = self.crew.world.brain.switches
        possible = self.crew.world.brain.switches.possible(self.crew.world.now)
        before = (switches.target, switches.generation, self.crew.phases())
        try:
            self.crew.ratio(prefill, decode, patience)
            assert switches.target in possible
        except InvalidRequest:
            assert (switches.target, switches.generation, self.crew.phases()) == before

    @rule(tokens=st.integers(1, 12))
    def a_request(self, tokens: int) -> None:
        try:
            self.asked[self.crew.submit(tokens)] = tokens
        except Overloaded:
            return

    @rule()
    def streams_go_on(self) -> None:
        self.crew.step()

    @rule(name=names)
    def a_node_switches(self, name: str) -> None:
        member = self.crew.members.get(name)
        if member is not None and member.ordered is not None:
            self.crew.switch(name)

    @rule(name=names)
    def a_node_dies(self, name: str) -> None:
        if name in self.crew.members:
            self.crew.die(name)

    @rule(name=names, beat=st.booleans())
    def a_node_starts_again(self, name: str, beat: bool) -> None:
        if name not in self.crew.members:
            self.crew.join(name, beat=beat)

    @rule(name=names)
    def a_node_reports(self, name: str) -> None:
        if name in self.crew.members:
            self.crew.beat(name)

    @precondition(lambda self: self.crew.world.brain.switches.flips)
    @rule()
    def probes_fail(self) -> None:
        for name in self.crew.phases():
            self.crew.fail_probe(name)

    @rule(seconds=st.floats(0.0, 40.0))
    def time_passes(self, seconds: float) -> None:
        self.crew.advance(seconds)
        live = {node.info.name for node in self.crew.world.brain.registry.nodes.values()}
        self.crew.members = {name: member for name, member in self.crew.members.items() if name in live}

    @invariant()
    def who_switches_is_out_of_service_and_known(self) -> None:
        brain = self.crew.world.brain
        for name, flip in brain.switches.flips.items():
            assert name in brain.registry.switching
            node = brain.registry.called(name)
            assert node is not None or flip.phase is Phase.ORDERED
            assert node is None or flip.incarnation == node.incarnation
            assert str(name) not in self.crew.in_service(Role.PREFILL) | self.crew.in_service(Role.DECODE)
        assert all(name in brain.switches.flips for name in NAMES if name in brain.registry.switching)

    @invariant()
    def nobody_waits_for_a_role_that_is_being_left(self) -> None:
        """A role of the target that nobody serves has nobody who is still only draining."""
        brain = self.crew.world.brain
        target = brain.switches.target
        if target is None or brain.switches._stale:
            return
        for role in Role:
            if target.of(role) and not brain.registry.serves(role):
                leaving = [flip for flip in brain.switches.flips.values() if flip.source is role]
                assert all(flip.phase is not Phase.DRAINING for flip in leaving)

    def teardown(self) -> None:
        """All come back, nobody dies any more: every request that was not refused ends, and the target is reached."""
        crew = self.crew
        for name in NAMES:
            if name not in crew.members:
                crew.join(name)
        target = crew.world.brain.switches.target
        if target is None or target.nodes != len(NAMES):
            crew.ratio(2, 3)
        crew.settle()
        target = crew.world.brain.switches.target
        assert target is not None
        assert (len(crew.in_service(Role.PREFILL)), len(crew.in_service(Role.DECODE))) == (
            target.prefill,
            target.decode,
        )
        assert crew.world.placed() == 0
        for request, tokens in self.asked.items():
            result = crew.world.end(request).result
            sent = crew.world.tokens(request)
            assert sent == [TOKEN] * len(sent)
            if isinstance(result, m.Finished):
                assert len(sent) == tokens
            else:
                assert result.code in {"unavailable", "deadline_exceeded", "node_gone", "stalled"}


SwitchesMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestSwitches = SwitchesMachine.TestCase
