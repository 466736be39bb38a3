"""The request table against a model, under anything: nodes that answer late, twice, wrongly or for somebody else, that
die, are drained and come back; clients that go away; time that runs out.

The model knows what a client may see (each request's tokens in order, without a gap or a repeat, and one end) and which
legs are open: opened by Submit or Prefill, closed by Cancel, by the node's own last word, or by its death.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from baton.errors import BatonError, HandoffFailed, InvalidRequest, LeaseExpired, Overloaded, Preempted, Stale
from baton.pb.common_pb2 import HandoffReport
from baton.types import AttemptKey, FinishReason, Incarnation, NodeName, RequestId, TokenEvent
from coordinator.core import messages as m
from tests.unit.coordinator_core.world import DECODE, PREFILL, World, ticket_for

ROLES = {"p0": PREFILL, "p1": PREFILL, "d0": DECODE, "d1": DECODE}
Order = tuple[Incarnation, m.Submit | m.Prefill]
Orders = MultipleResults[Order]
Answer = m.Reserved | m.Refused | m.Tokens | m.AttemptFailed | m.PrefillEnded | m.HandedOff | m.Admitted
WRONG = -1  # a token that no honest node sends

errors = st.sampled_from([LeaseExpired("late"), Preempted("no room"), Stale("old"), InvalidRequest("bad")])


def truth(request: RequestId, index: int) -> int:
    return (int(request[1:]) * 100 + index) % 997


class Client:
    """What one client has seen."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.end: m.End | None = None


class RequestTableMachine(RuleBasedStateMachine):
    orders: Bundle[Order] = Bundle("orders")  # what nodes were told and may answer, now or much later

    def __init__(self) -> None:
        super().__init__()
        self.world = World(max_queue=6, max_attempts=3, explain_keep=64)
        self.clients: defaultdict[RequestId, Client] = defaultdict(Client)
        self.limits: dict[RequestId, int] = {}
        self.legs: set[tuple[Incarnation, AttemptKey]] = set()
        self.decodes: set[tuple[Incarnation, AttemptKey]] = set()
        self.alive: dict[str, Incarnation] = {}
        self.drained: set[str] = set()
        self.speaker = Incarnation("")
        self.fresh: list[Order] = []

    @initialize()
    def start(self) -> None:
        for name in ("p0", "d0"):
            self.do(lambda name=name: self.join(name))  # type: ignore[misc]

    # observing

    def do(self, act: Callable[[], object]) -> None:
        """Carry out one input and check its effects, in order."""
        before = len(self.world.effects)
        act()
        for effect in self.world.effects[before:]:
            match effect:
                case m.Send(node, m.Submit() | m.Prefill() as order):
                    leg = (node, order.work.key)
                    assert self.world.brain.registry.nodes[node].info.name not in self.drained
                    assert leg not in self.legs
                    assert list(order.work.emitted) == self.clients[order.work.key.request].tokens
                    self.legs.add(leg)
                    if isinstance(order, m.Submit):
                        self.decodes.add(leg)
                    self.fresh.append((node, order))
                case m.Send(node, m.Cancel(key, _)):
                    assert (node, key) in self.legs, "a leg was cancelled that was not open"
                    self.legs.remove((node, key))
                case m.Emit(request, tokens):
                    client = self.clients[request]
                    assert client.end is None, "a token after the end"
                    client.tokens += tokens
                    assert client.tokens == [truth(request, index) for index in range(len(client.tokens))]
                    assert len(client.tokens) <= self.limits[request]
                    for leg in self.decodes & self.legs:
                        if leg[0] == self.speaker and leg[1].request == request:
                            self.committed(leg[1])
                case m.End(request, result):
                    client = self.clients[request]
                    assert client.end is None, "a second end"
                    client.end = effect
                    self.explained(effect)
                    assert effect.tokens == len(client.tokens)
                    if isinstance(result, m.Finished):
                        assert client.tokens
                    else:
                        assert not [leg for leg in self.legs if leg[1].request == request]
                    self.legs = {leg for leg in self.legs if leg[1].request != request}
                case m.Lost(node):
                    self.legs = {leg for leg in self.legs if leg[0] != node}
                    self.alive = {name: other for name, other in self.alive.items() if other != node}
                case _:
                    pass

    def explained(self, end: m.End) -> None:
        told = self.world.brain.explain(end.request, self.world.now)
        line = told.timeline
        assert line.ttft == pytest.approx(end.ttft if end.ttft is not None else line.total)
        assert line.queue + line.reserve + line.prefill + line.transfer + line.first_token == pytest.approx(line.ttft)
        assert line.ttft + told.decode == pytest.approx(line.total)
        assert len(told.attempts) + told.attempts_left_out == line.attempts
        assert all(attempt.ended and attempt.placed <= attempt.over for attempt in told.attempts)
        assert told.output_tokens == end.tokens

    def join(self, name: str) -> None:
        self.alive.pop(name, None)
        self.alive[name] = self.world.join(name, ROLES[name])

    def say(self, node: Incarnation, message: Answer, *, last_word: bool = False) -> None:
        """Whatever does not come from an open leg must change nothing."""
        keys = {event.key for event in message.events} if isinstance(message, m.Tokens) else {message.key}
        is_open = all((node, key) in self.legs for key in keys)
        if last_word:
            self.legs -= {(node, key) for key in keys}
        self.speaker = node
        if isinstance(message, m.Admitted) and (node, message.key) in self.legs & self.decodes:
            self.committed(message.key)
        before = len(self.world.effects)
        self.do(lambda: self.world.say(node, message))
        assert is_open or len(self.world.effects) == before

    def committed(self, key: AttemptKey) -> None:
        """Decode runs it: the writer's leg is over without a cancel."""
        self.legs = {leg for leg in self.legs if leg[1] != key or leg in self.decodes}

    # clients and time

    @rule(target=orders, prompt=st.integers(1, 120), max_tokens=st.integers(1, 6), timeout=st.floats(1.0, 40.0))
    def submit(self, prompt: int, max_tokens: int, timeout: float) -> Orders:
        def act() -> None:
            self.limits[RequestId(f"r{self.world._requests + 1}")] = max_tokens
            try:
                self.world.submit(prompt, max_tokens, timeout)
            except Overloaded:
                del self.limits[RequestId(f"r{self.world._requests}")]

        self.do(act)
        return self.new_orders()

    @rule(target=orders, number=st.integers(1, 20))
    def cancel(self, number: int) -> Orders:
        self.do(lambda: self.world.cancel(RequestId(f"r{number}")))
        return self.new_orders()

    @rule(target=orders, seconds=st.floats(0.0, 20.0), beating=st.booleans())
    def time_passes(self, seconds: float, beating: bool) -> Orders:
        self.do(lambda: self.world.advance(seconds, beating=beating))
        return self.new_orders()

    # nodes

    @rule(target=orders, name=st.sampled_from(sorted(ROLES)))
    def a_node_joins(self, name: str) -> Orders:
        self.do(lambda: self.join(name))
        return self.new_orders()

    @rule(target=orders, name=st.sampled_from(sorted(ROLES)))
    def a_node_dies(self, name: str) -> Orders:
        if name in self.alive:
            self.do(lambda: self.world.gone(self.alive[name]))
        return self.new_orders()

    @rule(target=orders, name=st.sampled_from(sorted(ROLES)), room=st.integers(0, 32), age=st.sampled_from([0.0, 99.0]))
    def a_node_reports(self, name: str, room: int, age: float) -> Orders:
        if name in self.alive:
            self.do(lambda: self.world.beat(self.alive[name], room, progress_age_seconds=age))
        return self.new_orders()

    @rule(target=orders, name=st.sampled_from(sorted(ROLES)), timeout=st.sampled_from([None, 0.0, 5.0]))
    def a_node_is_drained(self, name: str, timeout: float | None) -> Orders:
        def act() -> None:
            self.world.effects += self.world.brain.drain_node(NodeName(name), timeout, self.world.now)

        if name in self.alive:
            self.drained.add(name)
            self.do(act)
            assert timeout != 0.0 or not [leg for leg in self.legs if leg[0] == self.alive[name]]
        return self.new_orders()

    @rule(target=orders, name=st.sampled_from(sorted(ROLES)))
    def a_node_is_put_back(self, name: str) -> Orders:
        def act() -> None:
            self.world.effects += self.world.brain.undrain_node(NodeName(name), self.world.now)

        if name in self.alive or name in self.drained:
            self.drained.discard(name)
            self.do(act)
        return self.new_orders()

    @rule(target=orders, order=orders)
    def it_is_reserved(self, order: Order) -> Orders:
        node, told = order
        if isinstance(told, m.Submit):
            writer = told.writer.incarnation if told.writer else None
            ticket = ticket_for(node, told.work.key, writer) if writer else None
            self.say(node, m.Reserved(told.work.key, ticket, 0))
        return self.new_orders()

    @rule(target=orders, order=orders)
    def it_needs_no_writer(self, order: Order) -> Orders:
        if isinstance(order[1], m.Submit):
            self.say(order[0], m.Reserved(order[1].work.key, None, 0))
        return self.new_orders()

    @rule(target=orders, order=orders, needed=st.integers(1, 40), free=st.integers(0, 32))
    def it_is_refused(self, order: Order, needed: int, free: int) -> Orders:
        self.say(order[0], m.Refused(order[1].work.key, needed, free), last_word=True)
        return self.new_orders()

    @rule(target=orders, order=orders, error=errors)
    def it_fails(self, order: Order, error: BatonError) -> Orders:
        self.say(order[0], m.AttemptFailed(order[1].work.key, error), last_word=True)
        return self.new_orders()

    @rule(target=orders, order=orders, computed=st.integers(0, 50), cached=st.integers(0, 50))
    def it_is_computed(self, order: Order, computed: int, cached: int) -> Orders:
        self.say(order[0], m.PrefillEnded(order[1].work.key, computed, cached))
        return self.new_orders()

    @rule(target=orders, order=orders)
    def it_is_handed_off(self, order: Order) -> Orders:
        node, told = order
        message = m.HandedOff(told.work.key, HandoffReport(transport="shm"))
        self.say(node, message, last_word=isinstance(told, m.Prefill))
        return self.new_orders()

    @rule(target=orders, order=orders, received=st.integers(0, 50))
    def it_runs(self, order: Order, received: int) -> Orders:
        self.say(order[0], m.Admitted(order[1].work.key, 0, 0, received))
        return self.new_orders()

    @rule(target=orders, order=orders, count=st.integers(1, 4), stop=st.booleans())
    def it_continues(self, order: Order, count: int, stop: bool) -> Orders:
        """An honest node goes on from what the client has; a prefill node only to end the request."""
        node, told = order
        key = told.work.key
        start = len(self.clients[key.request].tokens)
        finish = FinishReason.STOP if stop or isinstance(told, m.Prefill) else None
        events = [TokenEvent(key, index, truth(key.request, index)) for index in range(start, start + count)]
        if isinstance(told, m.Prefill):
            events = events[:1]
        if finish is not None:
            events[-1] = replace(events[-1], finish=finish)
        self.say(node, m.Tokens(tuple(events)))
        return self.new_orders()

    @rule(target=orders, order=orders, offset=st.sampled_from([-3, -1, 1, 5]))
    def it_sends_a_wrong_index(self, order: Order, offset: int) -> Orders:
        key = order[1].work.key
        index = max(0, len(self.clients[key.request].tokens) + offset)
        if index != len(self.clients[key.request].tokens):
            self.say(order[0], m.Tokens((TokenEvent(key, index, WRONG),)))
        return self.new_orders()

    @rule(target=orders, order=orders, other=orders)
    def another_node_speaks_of_it(self, order: Order, other: Order) -> Orders:
        key, stranger = order[1].work.key, other[0]
        if (stranger, key) not in self.legs:
            index = len(self.clients[key.request].tokens)
            for message in (
                m.Tokens((TokenEvent(key, index, WRONG, FinishReason.STOP),)),
                m.AttemptFailed(key, HandoffFailed("not mine")),
                m.Refused(key, 1, 0),
            ):
                self.say(stranger, message)
        return self.new_orders()

    @rule(order=consumes(orders))
    def it_is_forgotten(self, order: Order) -> None:
        """The node never speaks of it again."""

    def new_orders(self) -> Orders:
        found, self.fresh = self.fresh, []
        return multiple(*found)

    # what always holds

    @invariant()
    def books_agree(self) -> None:
        brain = self.world.brain
        for node in brain.registry.nodes:
            assert brain.placed_on(node) == len([leg for leg in self.legs if leg[0] == node]), node
        open_requests = {request for request in self.limits if self.clients[request].end is None}
        assert set(brain.active()) == open_requests
        assert {leg[1].request for leg in self.legs} <= open_requests
        assert brain.queued + brain.running == len(open_requests)

    def teardown(self) -> None:
        """With no help from any node, every request ends, and nothing is left."""
        self.do(lambda: self.world.advance(41.0))
        assert all(self.clients[request].end is not None for request in self.limits)
        assert self.legs == set()
        assert self.world.placed() == 0
        assert self.world.brain.queued == 0


RequestTableMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestRequestTable = RequestTableMachine.TestCase
