"""Honest nodes for the brain on its bench: they do what they are told, one step at a time, and take roles in place."""

from dataclasses import dataclass, field

from baton.errors import HandoffFailed
from baton.ratio import Split
from baton.types import AttemptKey, FinishReason, Incarnation, NodeName, RequestId, Role, Work
from coordinator.core import messages as m
from coordinator.core.flip import Phase
from tests.unit.coordinator_core.world import World

TOKEN = 7


@dataclass
class Member:
    """A node that lives: its role, what it decodes, and the role that it was told to take."""

    incarnation: Incarnation
    role: Role
    streams: dict[AttemptKey, Work] = field(default_factory=dict)
    ordered: Role | None = None


class Crew:
    def __init__(self, *names: str, mode: str = "disaggregated") -> None:
        """`p...` prefill, all others decode, as under `baton up`."""
        self.world = World(mode=mode, max_queue=64)
        self.members: dict[str, Member] = {}
        self.promised: dict[AttemptKey, tuple[Incarnation, Work]] = {}  # on decode, by the key of the hand-off
        self._seen = 0
        for name in names:
            self.join(name)

    # what a test does

    def join(self, name: str, role: Role | None = None, *, beat: bool = True) -> None:
        role = role or (Role.PREFILL if name.startswith("p") else Role.DECODE)
        incarnation = self.world.join(name, role)
        self.members[name] = Member(incarnation, role)
        self.obey()
        if beat:
            self.beat(name)

    def beat(self, name: str) -> None:
        self.world.beat(self.members[name].incarnation)
        self.obey()

    def die(self, name: str) -> None:
        self.world.gone(self.members.pop(name).incarnation)
        self.obey()

    def switch(self, name: str) -> None:
        """The node ends its stream and joins in the role that it was told to take."""
        role = self.members[name].ordered
        assert role is not None
        self.die(name)
        self.join(name, role)

    def ratio(self, prefill: int, decode: int, patience: float = 5.0) -> None:
        brain = self.world.brain
        self.world.effects += brain.set_ratio(Split(prefill, decode), patience, self.world.now)
        self.obey()

    def submit(self, max_tokens: int = 3) -> RequestId:
        request = self.world.submit(max_tokens=max_tokens)
        self.obey()
        return request

    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)
        self.obey()

    def step(self) -> None:
        """Every stream gets a token."""
        for member in list(self.members.values()):
            for key in list(member.streams):
                if key in member.streams:
                    self._token(member, key)
        self.obey()

    def settle(self, patience: int = 200) -> None:
        """Let everybody do everything that they were told, until nothing is left to do."""
        for _ in range(patience):
            for name in [name for name, member in self.members.items() if member.ordered]:
                self.switch(name)
            for name in list(self.members):
                self.beat(name)
            self.step()
            if self.world.brain.switches.settled and not self.world.brain.running and not self.world.brain.queued:
                return
            self.advance(0.5)
        raise AssertionError(f"not settled: {self.phases()}, {self.world.brain.switches.split()}")

    def fail_probe(self, name: str, why: str = "by the test") -> None:
        """Who still works on the node's probe, if there is one under way, gives it up."""
        brain = self.world.brain
        probe = brain.switches.flips[NodeName(name)].probe
        record = brain._table.records.get(probe) if probe is not None else None
        if record is not None and record.attempt is not None:
            key = record.attempt.key
            for member in self.members.values():
                member.streams.pop(key, None)
            self.world.fail(min(record.attempt.legs), key, HandoffFailed(why))
            self.obey()

    def phases(self) -> dict[str, Phase]:
        return {str(name): flip.phase for name, flip in self.world.brain.switches.flips.items()}

    def in_service(self, role: Role) -> set[str]:
        return {str(node.info.name) for node in self.world.brain.registry.in_service() if node.info.role is role}

    def attempts(self, name: str) -> int:
        return self.world.brain.placed_on(self.members[name].incarnation)

    # obeying

    def obey(self) -> None:
        while self._seen < len(self.world.effects):
            effect = self.world.effects[self._seen]
            self._seen += 1
            if isinstance(effect, m.Send):
                member = self._member(effect.node)
                if member is not None:
                    self._told(member, effect.message)

    def _member(self, incarnation: Incarnation) -> Member | None:
        return next((each for each in self.members.values() if each.incarnation == incarnation), None)

    def _told(self, member: Member, order: m.NodeOrder) -> None:
        assert member.ordered is None or isinstance(order, m.PeerGone), "the role is the last thing a node is told"
        me = member.incarnation
        match order:
            case m.SetRole(role):
                assert not member.streams, "told to switch with work left"
                member.ordered = role
            case m.Submit(work, None):
                assert member.role is Role.DECODE
                member.streams[work.key] = work
                self._token(member, work.key)
            case m.Submit(work, writer):
                assert member.role is Role.DECODE
                assert writer is not None
                self.promised[work.key] = (me, work)
                self.world.reserve(me, work.key, writer.incarnation)
            case m.Prefill(work, alone):
                assert member.role is Role.PREFILL
                if alone:
                    self.world.token(me, work.key, len(work.emitted), TOKEN, FinishReason.LENGTH)
            case m.GiveTicket(ticket):
                self._hand_off(me, ticket.key)
            case m.Cancel(key, _):
                member.streams.pop(key, None)
                self.promised.pop(key, None)
            case _:
                pass

    def _hand_off(self, prefill: Incarnation, key: AttemptKey) -> None:
        decode, work = self.promised.pop(key, (None, None))
        target = self._member(decode) if decode is not None else None
        if target is None or work is None:
            return
        self.world.prefill_ended(prefill, key)
        target.streams[key] = work
        self.world.say(target.incarnation, m.Admitted(key, 0, 0, len(work.context)))
        self._token(target, key)
        self.world.handed_off(prefill, key)

    def _token(self, member: Member, key: AttemptKey) -> None:
        record = self.world.brain._table.records.get(key.request)
        if record is None:
            member.streams.pop(key, None)
            return
        last = record.remaining == 1
        if last:
            member.streams.pop(key, None)
        finish = FinishReason.LENGTH if last else None
        self.world.token(member.incarnation, key, len(record.emitted), TOKEN, finish)
