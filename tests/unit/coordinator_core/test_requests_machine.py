"""The request table against a model, under anything: nodes that answer late, twice, wrongly or for somebody else, that
die, are drained and come back; clients that go away; time that runs out."""

from dataclasses import replace

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
from baton.types import FinishReason, NodeName, RequestId, TokenEvent, TokenScore
from coordinator.core import messages as m
from coordinator.core.record import RequestState
from tests.unit.coordinator_core.requests_model import (
    ROLES,
    Asked,
    Order,
    RequestTableModel,
    prompt_scores,
    score_of,
    truth,
)
from tests.unit.coordinator_core.world import ticket_for

Orders = MultipleResults[Order]
WRONG = -1  # a token that no honest node sends

errors = st.sampled_from([LeaseExpired("late"), Preempted("no room"), Stale("old"), InvalidRequest("bad")])


class RequestTableMachine(RequestTableModel, RuleBasedStateMachine):
    orders: Bundle[Order] = Bundle("orders")  # what nodes were told and may answer, now or much later

    @initialize()
    def start(self) -> None:
        for name in ("p0", "d0"):
            self.do(lambda name=name: self.join(name))  # type: ignore[misc]

    # clients and time

    @rule(
        target=orders,
        prompt=st.one_of(st.integers(1, 3), st.integers(1, 120)),
        max_tokens=st.integers(1, 6),
        timeout=st.floats(1.0, 40.0),
        logprobs=st.sampled_from([None, None, 0, 2]),
        prompt_logprobs=st.sampled_from([None, None, 0, 2]),
    )
    def submit(
        self, prompt: int, max_tokens: int, timeout: float, logprobs: int | None, prompt_logprobs: int | None
    ) -> Orders:
        self.submits(Asked(prompt, max_tokens, logprobs, prompt_logprobs), timeout, None)
        return self.new_orders()

    @rule(
        target=orders,
        number=st.integers(1, 20),
        max_tokens=st.integers(1, 6),
        timeout=st.floats(1.0, 40.0),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
    )
    def submit_another_choice(
        self, number: int, max_tokens: int, timeout: float, prompt_logprobs: int | None
    ) -> Orders:
        leader = RequestId(f"r{number}")
        if leader in self.asked:
            asked = Asked(self.asked[leader].prompt, max_tokens, None, prompt_logprobs)
            state = self.world.brain.state(leader)
            key = max((key for key in self.computes if key.request == leader), default=None)
            committed = state is not None and state is not RequestState.QUEUED and key in self.runs
            if state is not None and not committed and (prompt_logprobs is None or asked.prompt == 1):
                asked.after = leader
            self.submits(asked, timeout, leader)
        return self.new_orders()

    def submits(self, asked: Asked, timeout: float, after: RequestId | None) -> None:
        """`after` as the client says it; `asked.after` if it must wait."""

        def act() -> None:
            self.asked[RequestId(f"r{self.world._requests + 1}")] = asked
            choice = 0 if after is None else 1
            scores = {"logprobs": asked.logprobs, "prompt_logprobs": asked.prompt_logprobs}
            try:
                self.world.submit(asked.prompt, asked.max_tokens, timeout, after=after, choice=choice, **scores)
            except Overloaded:
                del self.asked[RequestId(f"r{self.world._requests}")]

        self.do(act)

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
        top = self.asked[key.request].logprobs if key.request in self.asked else None
        tokens = [truth(key.request, index) for index in range(start, start + count)]
        events = [
            TokenEvent(key, start + n, token, score=score_of(key.request, token, top)) for n, token in enumerate(tokens)
        ]
        if isinstance(told, m.Prefill):
            events = events[:1]
        if finish is not None:
            events[-1] = replace(events[-1], finish=finish)
        self.say(node, m.Tokens(tuple(events)))
        return self.new_orders()

    @rule(target=orders, order=orders, count=st.sampled_from([1, 2, 120]))
    def its_prompt_is_scored(self, order: Order, count: int) -> Orders:
        key, asked = order[1].work.key, self.asked[order[1].work.key.request]
        scores = prompt_scores(key.request, asked.prompt, asked.prompt_logprobs or 0)
        come = self.scored[key]
        if scores[come:]:
            self.say(order[0], m.PromptScores(key, come + 1, scores[come : come + count]))
        return self.new_orders()

    @rule(target=orders, order=orders, first=st.integers(0, 200))
    def its_prompt_is_scored_wrongly(self, order: Order, first: int) -> Orders:
        key = order[1].work.key
        if first != self.scored[key] + 1:
            self.say(order[0], m.PromptScores(key, first, (TokenScore(WRONG),)))
        return self.new_orders()

    @rule(target=orders, order=orders, top=st.sampled_from([None, 1, 3]))
    def it_leaves_the_score_out(self, order: Order, top: int | None) -> Orders:
        node, told = order
        key = told.work.key
        if self.asked[key.request].logprobs is not None:
            index, finish = len(self.clients[key.request].tokens), FinishReason.STOP
            self.say(node, m.Tokens((TokenEvent(key, index, WRONG, finish, score_of(key.request, 1, top)),)))
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
        open_requests = {request for request in self.asked if self.clients[request].end is None}
        assert set(brain.active()) == open_requests
        assert {leg[1].request for leg in self.legs} <= open_requests
        assert brain.queued + brain.running == len(open_requests)

    def teardown(self) -> None:
        """With no help from any node, every request ends, and nothing is left."""
        self.do(lambda: self.world.advance(41.0))
        assert all(self.clients[request].end is not None for request in self.asked)
        assert self.legs == set()
        assert self.world.placed() == 0
        assert self.world.brain.queued == 0


RequestTableMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.data_too_large],
)
TestRequestTable = RequestTableMachine.TestCase
