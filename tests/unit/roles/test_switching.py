"""A node that takes the other role in place: one pool, one scheduler and one engine under two role objects, each with
its own transfer plane for life."""

from typing import Any

import pytest

from baton.errors import Cancelled, ConfigError
from baton.pb import cluster_pb2
from baton.types import Incarnation, Role, Ticket
from decode_node.role import DecodeRole
from kv_transfer.plane import Committed, Lost, OutboundReport, Sealed, SealInfo, Started
from node_engine.core.ledger import BlockState
from node_engine.core.messages import Cancel, CoordinatorLost, Joined, PeerGone, Prefill, SetRole, Submit
from node_engine.host.compute import WhenIdle
from node_engine.host.roles import FromRole, RoleSwitch
from node_engine.role import NodeParts, RolePolicy
from prefill_node.role import PrefillRole
from tests.unit.roles.bench import WRITER, Bench, FakeInbound, FakeOutbound, tokens_of, work

PROMPT = tuple(range(1, 50))
AGAIN = Incarnation("again")


class Host:
    """What the process does around a role, by hand: `idle` is the compute thread coming to rest."""

    def __init__(self, role: Role) -> None:
        self.inbound, self.outbound = FakeInbound(), FakeOutbound()
        self.made: list[Role] = []
        self.emit: list[Any] = []
        self.rejoins = 0
        self.unbuildable: set[Role] = set()
        self.bench = Bench(lambda parts: self._switch(parts, role))

    def _switch(self, parts: NodeParts, role: Role) -> RoleSwitch:
        makers = {Role.PREFILL: self._prefill, Role.DECODE: self._decode}
        self.switch = RoleSwitch(parts, makers, role, self._rejoin)
        return self.switch

    def _prefill(self, parts: NodeParts) -> RolePolicy:
        self._make(Role.PREFILL)
        self.prefill_parts = parts
        return PrefillRole(parts, self.outbound)

    def _decode(self, parts: NodeParts) -> RolePolicy:
        self._make(Role.DECODE)
        self.decode_parts = parts
        return DecodeRole(parts, self.inbound)

    def _make(self, role: Role) -> None:
        if role in self.unbuildable:
            raise ConfigError("the port is taken")
        self.made.append(role)

    def _rejoin(self) -> None:
        self.rejoins += 1

    def idle(self) -> None:
        """Events are handled; who waits for rest is called if nothing is held."""
        events, self.bench.events[:] = list(self.bench.events), []
        for event in events:
            if isinstance(event, WhenIdle) and self.switch.holding == 0:
                event.call()
            elif isinstance(event, WhenIdle):
                self.bench.events.append(event)
            else:
                self.switch.handle(event)

    def take(self, role: Role, incarnation: Incarnation = AGAIN) -> None:
        self.bench.tell(SetRole(role))
        self.idle()
        assert self.switch.role is role
        self.bench.tell(Joined(incarnation))

    def prefill(self, request: str = "r") -> None:
        """Compute a prompt, hand it off, and be told that decode has it."""
        given = work(PROMPT, request=request)
        self.bench.tell(Prefill(given, alone=False))
        while self.bench.step():
            pass
        report = OutboundReport("memory", 1, 1, 0, 0.0, 0.0)
        self.prefill_parts.emit(Committed(given.key, report))
        self.idle()


def kinds(sent: list[cluster_pb2.NodeMessage]) -> list[str]:
    return [str(message.WhichOneof("message")) for message in sent]


def test_what_it_computed_as_prefill_it_finds_as_decode() -> None:
    host = Host(Role.PREFILL)
    host.prefill()
    cached = host.bench.pool.counts()[BlockState.CACHED]
    assert cached == 4
    host.take(Role.DECODE)
    assert (host.made, host.rejoins) == ([Role.PREFILL, Role.DECODE], 1)
    assert host.bench.pool.counts()[BlockState.CACHED] == cached
    assert host.inbound.incarnation == AGAIN
    host.bench.sent.clear()
    host.bench.tell(Submit(work(PROMPT, request="s", max_tokens=2), WRITER))
    [reserved] = host.bench.take("reserved")
    assert (reserved.held_tokens, reserved.HasField("ticket")) == (len(PROMPT) - 1, False)
    while host.bench.step():
        pass
    [admitted] = host.bench.take("admitted")
    assert (admitted.cached_tokens, admitted.computed_tokens) == (48, 1)
    assert [index for message in host.bench.take("tokens") for index, _ in tokens_of(message)] == [0, 1]
    assert host.bench.held() == {}


def test_it_waits_until_nothing_is_held() -> None:
    host = Host(Role.PREFILL)
    host.bench.tell(Prefill(work(PROMPT), alone=False))
    host.bench.tell(SetRole(Role.DECODE))
    host.idle()
    assert (host.switch.role, host.rejoins) == (Role.PREFILL, 0)
    host.prefill()
    host.idle()
    assert (host.switch.role, host.rejoins) == (Role.DECODE, 1)


@pytest.mark.parametrize("ends", [Joined(AGAIN), CoordinatorLost()])
def test_an_order_dies_with_the_incarnation_that_it_was_for(ends: Any) -> None:
    host = Host(Role.PREFILL)
    host.bench.tell(Prefill(work(PROMPT), alone=False))
    host.bench.tell(SetRole(Role.DECODE))
    host.idle()
    host.bench.tell(ends)
    host.prefill()
    assert (host.switch.role, host.rejoins, host.made) == (Role.PREFILL, 0, [Role.PREFILL])


def test_roles_and_planes_are_made_once_and_kept() -> None:
    """The fences of the arena outlive every switch: no ticket ever gets a byte that another had."""
    host = Host(Role.DECODE)
    host.bench.tell(Submit(work(PROMPT, request="a"), WRITER))
    [first] = host.inbound.granted.values()
    host.bench.tell(Cancel(first.key, Cancelled("by the test")))
    host.decode_parts.emit(Lost(first.id, Cancelled("by the test"), fenced=True))
    host.idle()
    host.take(Role.PREFILL, Incarnation("two"))
    assert (host.outbound.incarnation, host.inbound.incarnation) == ("two", "two")
    host.prefill()
    host.take(Role.DECODE, Incarnation("three"))
    assert host.made == [Role.DECODE, Role.PREFILL]
    assert (host.outbound.incarnation, host.inbound.incarnation) == ("three", "three")
    host.bench.tell(Submit(work(tuple(range(500, 560)), request="b"), WRITER))
    tickets: list[Ticket] = list(host.inbound.granted.values())
    assert len({ticket.fence for ticket in tickets}) == len(tickets) == 2
    assert tickets[-1].decode.incarnation == "three"


def test_both_planes_hear_of_peers_and_events_find_their_own_role() -> None:
    host = Host(Role.DECODE)
    host.bench.tell(Submit(work(PROMPT), WRITER))
    [ticket] = host.inbound.granted.values()
    host.decode_parts.emit(Started(ticket.id))
    host.decode_parts.emit(Sealed(ticket.id, SealInfo((7,), None), 0))
    assert [type(event) for event in host.bench.events] == [FromRole, FromRole]
    host.idle()
    assert host.inbound.committed == [ticket.id]
    host.bench.tell(Cancel(ticket.key, Cancelled("by the test")))
    host.take(Role.PREFILL)
    host.bench.tell(PeerGone(WRITER.incarnation))
    assert host.inbound.gone == [WRITER.incarnation]


def test_a_role_that_cannot_be_had_leaves_the_node_as_it_was() -> None:
    host = Host(Role.PREFILL)
    host.unbuildable = {Role.DECODE}
    host.bench.tell(SetRole(Role.DECODE))
    host.idle()
    assert (host.switch.role, host.rejoins) == (Role.PREFILL, 1)
    host.bench.tell(Joined(AGAIN))
    host.prefill()
    assert "handed_off" in kinds(host.bench.sent)
