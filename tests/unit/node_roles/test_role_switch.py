"""A node that takes the other role in place: one pool, one scheduler and one engine under two role
objects, each with its own transfer plane for life."""

from typing import Any

import pytest

from baton.cluster_link.messages import (
    CancelOrder,
    DecodeOrder,
    PeerLostNotice,
    PrefillOrder,
    SetRoleOrder,
)
from baton.errors import Cancelled, ConfigError
from baton.pb import cluster_pb2
from baton.types import Incarnation, Role, Ticket
from decode_node.decode_role import DecodeRole
from kv_transfer.plane import (
    HandoffStats,
    InboundLost,
    InboundSealed,
    InboundStarted,
    OutboundCommitted,
    SealInfo,
)
from node_engine.core.blocks.block_records import BlockState
from node_engine.core.node_commands import CoordinatorLost, NodeJoined
from node_engine.host.compute_thread import CallWhenIdle, RoleEvent, SwitchableRole
from node_engine.roles.role_policy import RoleContext, RolePolicy
from prefill_node.prefill_role import PrefillRole
from tests.unit.node_roles.role_bench import (
    WRITER,
    FakeInbound,
    FakeOutbound,
    RoleBench,
    make_work,
    tokens_of,
)

PROMPT = tuple(range(1, 50))
AGAIN = Incarnation("again")


class SwitchingBench:
    """What the process does around a role, by hand: `drain_events` is the compute thread coming to
    rest."""

    def __init__(self, role: Role) -> None:
        self.inbound, self.outbound = FakeInbound(), FakeOutbound()
        self.built_roles: list[Role] = []
        self.emit: list[Any] = []
        self.rejoins = 0
        self.unbuildable: set[Role] = set()
        self.bench = RoleBench(lambda context: self._switch(context, role))

    def _switch(self, context: RoleContext, role: Role) -> SwitchableRole:
        role_factories = {Role.PREFILL: self._prefill, Role.DECODE: self._decode}
        self.switch = SwitchableRole(context, role_factories, role, self._rejoin)
        return self.switch

    def _prefill(self, context: RoleContext) -> RolePolicy:
        self._make(Role.PREFILL)
        self.prefill_parts = context
        return PrefillRole(context, self.outbound)

    def _decode(self, context: RoleContext) -> RolePolicy:
        self._make(Role.DECODE)
        self.decode_parts = context
        return DecodeRole(context, self.inbound)

    def _make(self, role: Role) -> None:
        if role in self.unbuildable:
            raise ConfigError("the port is taken")
        self.built_roles.append(role)

    def _rejoin(self) -> None:
        self.rejoins += 1

    def drain_events(self) -> None:
        """Events are handled; who waits for rest is called if nothing is held."""
        events, self.bench.events[:] = list(self.bench.events), []
        for event in events:
            if isinstance(event, CallWhenIdle) and self.switch.num_held_attempts == 0:
                event.callback()
            elif isinstance(event, CallWhenIdle):
                self.bench.events.append(event)
            else:
                self.switch.handle_item(event)

    def switch_role(self, role: Role, incarnation: Incarnation = AGAIN) -> None:
        self.bench.send_item(SetRoleOrder(role))
        self.drain_events()
        assert self.switch.role is role
        self.bench.send_item(NodeJoined(incarnation))

    def prefill_prompt(self, request: str = "r") -> None:
        """Compute a prompt, hand it off, and be told that decode has it."""
        given = make_work(PROMPT, request=request)
        self.bench.send_item(PrefillOrder(given, needs_no_decode=False))
        while self.bench.step():
            pass
        report = HandoffStats("memory", 1, 1, 0, 0.0, 0.0)
        self.prefill_parts.emit(OutboundCommitted(given.key, report))
        self.drain_events()


def kinds(sent: list[cluster_pb2.NodeMessage]) -> list[str]:
    return [str(message.WhichOneof("message")) for message in sent]


def test_cache_survives_a_role_switch() -> None:
    host = SwitchingBench(Role.PREFILL)
    host.prefill_prompt()
    cached = host.bench.pool.ownership.count_blocks_by_state()[BlockState.CACHED]
    assert cached == 4
    host.switch_role(Role.DECODE)
    assert (host.built_roles, host.rejoins) == ([Role.PREFILL, Role.DECODE], 1)
    assert host.bench.pool.ownership.count_blocks_by_state()[BlockState.CACHED] == cached
    assert host.inbound.incarnation == AGAIN
    host.bench.sent_messages.clear()
    host.bench.send_item(DecodeOrder(make_work(PROMPT, request="s", max_tokens=2), WRITER))
    [reserved] = host.bench.pop_messages("reserved")
    assert (reserved.held_tokens, reserved.HasField("ticket")) == (len(PROMPT) - 1, False)
    while host.bench.step():
        pass
    [admitted] = host.bench.pop_messages("admitted")
    assert (admitted.cached_tokens, admitted.computed_tokens) == (48, 1)
    assert [
        index for message in host.bench.pop_messages("tokens") for index, _ in tokens_of(message)
    ] == [0, 1]
    assert host.bench.count_held_blocks() == {}


def test_role_switch_waits_until_nothing_is_held() -> None:
    host = SwitchingBench(Role.PREFILL)
    host.bench.send_item(PrefillOrder(make_work(PROMPT), needs_no_decode=False))
    host.bench.send_item(SetRoleOrder(Role.DECODE))
    host.drain_events()
    assert (host.switch.role, host.rejoins) == (Role.PREFILL, 0)
    host.prefill_prompt()
    host.drain_events()
    assert (host.switch.role, host.rejoins) == (Role.DECODE, 1)


@pytest.mark.parametrize("ends", [NodeJoined(AGAIN), CoordinatorLost()])
def test_new_incarnation_voids_a_role_switch(ends: Any) -> None:
    host = SwitchingBench(Role.PREFILL)
    host.bench.send_item(PrefillOrder(make_work(PROMPT), needs_no_decode=False))
    host.bench.send_item(SetRoleOrder(Role.DECODE))
    host.drain_events()
    host.bench.send_item(ends)
    host.prefill_prompt()
    assert (host.switch.role, host.rejoins, host.built_roles) == (Role.PREFILL, 0, [Role.PREFILL])


def test_roles_and_planes_are_built_once() -> None:
    """The fences of the arena outlive every switch: no ticket ever gets a byte that another had."""
    host = SwitchingBench(Role.DECODE)
    host.bench.send_item(DecodeOrder(make_work(PROMPT, request="a"), WRITER))
    [first] = host.inbound.granted.values()
    host.bench.send_item(CancelOrder(first.key, Cancelled("by the test")))
    host.decode_parts.emit(InboundLost(first.id, Cancelled("by the test"), is_fenced=True))
    host.drain_events()
    host.switch_role(Role.PREFILL, Incarnation("two"))
    assert (host.outbound.incarnation, host.inbound.incarnation) == ("two", "two")
    host.prefill_prompt()
    host.switch_role(Role.DECODE, Incarnation("three"))
    assert host.built_roles == [Role.DECODE, Role.PREFILL]
    assert (host.outbound.incarnation, host.inbound.incarnation) == ("three", "three")
    host.bench.send_item(DecodeOrder(make_work(tuple(range(500, 560)), request="b"), WRITER))
    tickets: list[Ticket] = list(host.inbound.granted.values())
    assert len({ticket.fence_byte for ticket in tickets}) == len(tickets) == 2
    assert tickets[-1].decode_peer.incarnation == "three"


def test_both_planes_hear_of_peers_and_events_find_their_own_role() -> None:
    host = SwitchingBench(Role.DECODE)
    host.bench.send_item(DecodeOrder(make_work(PROMPT), WRITER))
    [ticket] = host.inbound.granted.values()
    host.decode_parts.emit(InboundStarted(ticket.id))
    host.decode_parts.emit(InboundSealed(ticket.id, SealInfo((7,), None), 0))
    assert [type(event) for event in host.bench.events] == [RoleEvent, RoleEvent]
    host.drain_events()
    assert host.inbound.committed == [ticket.id]
    host.bench.send_item(CancelOrder(ticket.key, Cancelled("by the test")))
    host.switch_role(Role.PREFILL)
    host.bench.send_item(PeerLostNotice(WRITER.incarnation))
    assert host.inbound.gone == [WRITER.incarnation]


def test_failed_role_switch_keeps_the_role() -> None:
    host = SwitchingBench(Role.PREFILL)
    host.unbuildable = {Role.DECODE}
    host.bench.send_item(SetRoleOrder(Role.DECODE))
    host.drain_events()
    assert (host.switch.role, host.rejoins) == (Role.PREFILL, 1)
    host.bench.send_item(NodeJoined(AGAIN))
    host.prefill_prompt()
    assert "handed_off" in kinds(host.bench.sent_messages)
