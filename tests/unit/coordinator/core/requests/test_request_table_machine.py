"""The request table against a model, under random inputs.

Nodes answer late, twice, wrongly or for others; they die, are drained and return; clients
cancel; deadlines pass."""

from dataclasses import replace
from typing import Any

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

from baton.cluster_link.messages import (
    AttemptFailed,
    BlocksReserved,
    DecodeOrder,
    DecodeStarted,
    HandoffCompleted,
    PrefillEnded,
    PrefillOrder,
    PromptLogprobsReport,
    ReservationRefused,
    StepTokens,
)
from baton.cluster_link.report_types import HandoffReport
from baton.errors import (
    BatonError,
    HandoffFailed,
    InvalidRequest,
    LeaseExpired,
    Overloaded,
    Preempted,
    StaleMessage,
)
from baton.types import FinishReason, NodeName, RequestId, TokenEvent, TokenLogprobs
from coordinator.core.requests.record import RequestState
from simulator.node_messages import make_ticket
from tests.unit.coordinator.core.requests.request_table_model import (
    ROLES,
    ExpectedRequest,
    PlacedOrder,
    RequestTableModel,
    expected_logprobs,
    expected_prompt_logprobs,
    expected_token,
)

pytestmark = pytest.mark.slow

Orders = MultipleResults[PlacedOrder]
WRONG = -1  # a token that no honest node sends

errors = st.sampled_from(
    [LeaseExpired("late"), Preempted("no room"), StaleMessage("old"), InvalidRequest("bad")]
)


class RequestTableMachine(RequestTableModel, RuleBasedStateMachine):
    orders: Bundle[PlacedOrder] = Bundle(
        "orders"
    )  # what nodes were told and may answer, now or much later

    @initialize()
    def start(self) -> None:
        for name in ("p0", "d0"):
            self.apply_input(lambda name=name: self.join_node(name))  # type: ignore[misc]

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
        self,
        prompt: int,
        max_tokens: int,
        timeout: float,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> Orders:
        self.submits(ExpectedRequest(prompt, max_tokens, logprobs, prompt_logprobs), timeout, None)
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
        if leader in self.expected_requests:
            asked = ExpectedRequest(
                self.expected_requests[leader].prompt, max_tokens, None, prompt_logprobs
            )
            state = self.world.brain.get_request_state(leader)
            key = max(
                (key for key in self.computing_nodes if key.request_id == leader), default=None
            )
            committed = (
                state is not None
                and state is not RequestState.QUEUED
                and key in self.committed_attempts
            )
            if (
                state is not None
                and not committed
                and (prompt_logprobs is None or asked.prompt == 1)
            ):
                asked.after = leader
            self.submits(asked, timeout, leader)
        return self.new_orders()

    def submits(self, asked: ExpectedRequest, timeout: float, after: RequestId | None) -> None:
        """`after` as the client says it; `asked.after` if it must wait."""

        def act() -> None:
            self.expected_requests[RequestId(f"r{self.world._requests + 1}")] = asked
            choice = 0 if after is None else 1
            scores: dict[str, Any] = {
                "logprobs": asked.logprobs,
                "prompt_logprobs": asked.prompt_logprobs,
            }
            try:
                self.world.submit(
                    asked.prompt, asked.max_tokens, timeout, after=after, choice=choice, **scores
                )
            except Overloaded:
                del self.expected_requests[RequestId(f"r{self.world._requests}")]

        self.apply_input(act)

    @rule(target=orders, number=st.integers(1, 20))
    def cancel(self, number: int) -> Orders:
        self.apply_input(lambda: self.world.cancel(RequestId(f"r{number}")))
        return self.new_orders()

    @rule(target=orders, seconds=st.floats(0.0, 20.0), beating=st.booleans())
    def time_passes(self, seconds: float, beating: bool) -> Orders:
        self.apply_input(lambda: self.world.advance(seconds, beating=beating))
        return self.new_orders()

    # nodes

    @rule(target=orders, name=st.sampled_from(sorted(ROLES)))
    def a_node_joins(self, name: str) -> Orders:
        self.apply_input(lambda: self.join_node(name))
        return self.new_orders()

    @rule(target=orders, name=st.sampled_from(sorted(ROLES)))
    def a_node_dies(self, name: str) -> Orders:
        if name in self.alive:
            self.apply_input(lambda: self.world.lose_node(self.alive[name]))
        return self.new_orders()

    @rule(
        target=orders,
        name=st.sampled_from(sorted(ROLES)),
        room=st.integers(0, 32),
        age=st.sampled_from([0.0, 99.0]),
    )
    def a_node_reports(self, name: str, room: int, age: float) -> Orders:
        if name in self.alive:
            self.apply_input(
                lambda: self.world.send_heartbeat(self.alive[name], room, progress_age_seconds=age)
            )
        return self.new_orders()

    @rule(
        target=orders,
        name=st.sampled_from(sorted(ROLES)),
        timeout=st.sampled_from([None, 0.0, 5.0]),
    )
    def a_node_is_drained(self, name: str, timeout: float | None) -> Orders:
        def act() -> None:
            self.world.effects += self.world.brain.drain_node(
                NodeName(name), timeout, self.world.now
            )

        if name in self.alive:
            incarnation = self.alive[name]  # a node that has made no progress is lost meanwhile
            self.drained.add(name)
            self.apply_input(act)
            assert timeout != 0.0 or not [leg for leg in self.legs if leg[0] == incarnation]
        return self.new_orders()

    @rule(target=orders, name=st.sampled_from(sorted(ROLES)))
    def a_node_is_put_back(self, name: str) -> Orders:
        def act() -> None:
            self.world.effects += self.world.brain.undrain_node(NodeName(name), self.world.now)

        if name in self.alive or name in self.drained:
            self.drained.discard(name)
            self.apply_input(act)
        return self.new_orders()

    @rule(target=orders, order=orders)
    def it_is_reserved(self, order: PlacedOrder) -> Orders:
        node, told = order
        if isinstance(told, DecodeOrder):
            writer = told.kv_writer.incarnation if told.kv_writer else None
            ticket = make_ticket(node, told.work.key, writer) if writer else None
            self.send_from_node(node, BlocksReserved(told.work.key, ticket, 0))
        return self.new_orders()

    @rule(target=orders, order=orders)
    def it_needs_no_writer(self, order: PlacedOrder) -> Orders:
        if isinstance(order[1], DecodeOrder):
            self.send_from_node(order[0], BlocksReserved(order[1].work.key, None, 0))
        return self.new_orders()

    @rule(target=orders, order=orders, needed=st.integers(1, 40), free=st.integers(0, 32))
    def it_is_refused(self, order: PlacedOrder, needed: int, free: int) -> Orders:
        self.send_from_node(
            order[0], ReservationRefused(order[1].work.key, needed, free), last_word=True
        )
        return self.new_orders()

    @rule(target=orders, order=orders, error=errors)
    def it_fails(self, order: PlacedOrder, error: BatonError) -> Orders:
        self.send_from_node(order[0], AttemptFailed(order[1].work.key, error), last_word=True)
        return self.new_orders()

    @rule(target=orders, order=orders, computed=st.integers(0, 50), cached=st.integers(0, 50))
    def it_is_computed(self, order: PlacedOrder, computed: int, cached: int) -> Orders:
        self.send_from_node(order[0], PrefillEnded(order[1].work.key, computed, cached))
        return self.new_orders()

    @rule(target=orders, order=orders)
    def it_is_handed_off(self, order: PlacedOrder) -> Orders:
        node, told = order
        message = HandoffCompleted(told.work.key, HandoffReport(transport="shm"))
        self.send_from_node(node, message, last_word=isinstance(told, PrefillOrder))
        return self.new_orders()

    @rule(target=orders, order=orders, received=st.integers(0, 50))
    def it_runs(self, order: PlacedOrder, received: int) -> Orders:
        self.send_from_node(order[0], DecodeStarted(order[1].work.key, 0, 0, received))
        return self.new_orders()

    @rule(target=orders, order=orders, count=st.integers(1, 4), stop=st.booleans())
    def it_continues(self, order: PlacedOrder, count: int, stop: bool) -> Orders:
        """An honest node continues from what the client has; a prefill node sends a token only
        to end the request."""
        node, told = order
        key = told.work.key
        start = len(self.clients[key.request_id].tokens)
        finish = FinishReason.STOP if stop or isinstance(told, PrefillOrder) else None
        top = (
            self.expected_requests[key.request_id].logprobs
            if key.request_id in self.expected_requests
            else None
        )
        tokens = [expected_token(key.request_id, index) for index in range(start, start + count)]
        events = [
            TokenEvent(
                key, start + n, token, logprobs=expected_logprobs(key.request_id, token, top)
            )
            for n, token in enumerate(tokens)
        ]
        if isinstance(told, PrefillOrder):
            events = events[:1]
        if finish is not None:
            events[-1] = replace(events[-1], finish_reason=finish)
        self.send_from_node(node, StepTokens(tuple(events)))
        return self.new_orders()

    @rule(target=orders, order=orders, count=st.sampled_from([1, 2, 120]))
    def its_prompt_is_scored(self, order: PlacedOrder, count: int) -> Orders:
        key, asked = order[1].work.key, self.expected_requests[order[1].work.key.request_id]
        scores = expected_prompt_logprobs(key.request_id, asked.prompt, asked.prompt_logprobs or 0)
        come = self.received_prompt_logprobs[key]
        if scores[come:]:
            self.send_from_node(
                order[0], PromptLogprobsReport(key, come + 1, scores[come : come + count])
            )
        return self.new_orders()

    @rule(target=orders, order=orders, first=st.integers(0, 200))
    def its_prompt_is_scored_wrongly(self, order: PlacedOrder, first: int) -> Orders:
        key = order[1].work.key
        if first != self.received_prompt_logprobs[key] + 1:
            self.send_from_node(order[0], PromptLogprobsReport(key, first, (TokenLogprobs(WRONG),)))
        return self.new_orders()

    @rule(target=orders, order=orders, top=st.sampled_from([None, 1, 3]))
    def it_leaves_the_score_out(self, order: PlacedOrder, top: int | None) -> Orders:
        node, told = order
        key = told.work.key
        if self.expected_requests[key.request_id].logprobs is not None:
            index, finish = len(self.clients[key.request_id].tokens), FinishReason.STOP
            self.send_from_node(
                node,
                StepTokens(
                    (
                        TokenEvent(
                            key, index, WRONG, finish, expected_logprobs(key.request_id, 1, top)
                        ),
                    )
                ),
            )
        return self.new_orders()

    @rule(target=orders, order=orders, offset=st.sampled_from([-3, -1, 1, 5]))
    def it_sends_a_wrong_index(self, order: PlacedOrder, offset: int) -> Orders:
        key = order[1].work.key
        index = max(0, len(self.clients[key.request_id].tokens) + offset)
        if index != len(self.clients[key.request_id].tokens):
            self.send_from_node(order[0], StepTokens((TokenEvent(key, index, WRONG),)))
        return self.new_orders()

    @rule(target=orders, order=orders, other=orders)
    def another_node_speaks_of_it(self, order: PlacedOrder, other: PlacedOrder) -> Orders:
        key, stranger = order[1].work.key, other[0]
        if (stranger, key) not in self.legs:
            index = len(self.clients[key.request_id].tokens)
            for message in (
                StepTokens((TokenEvent(key, index, WRONG, FinishReason.STOP),)),
                AttemptFailed(key, HandoffFailed("not mine")),
                ReservationRefused(key, 1, 0),
            ):
                self.send_from_node(stranger, message)
        return self.new_orders()

    @rule(order=consumes(orders))
    def it_is_forgotten(self, order: PlacedOrder) -> None:
        """The node never reports on the attempt again."""

    def new_orders(self) -> Orders:
        found, self.new_order_list = self.new_order_list, []
        return multiple(*found)

    # what always holds

    @invariant()
    def books_agree(self) -> None:
        brain = self.world.brain
        for node in brain.node_registry.nodes:
            assert brain.count_attempts(node) == len(
                [leg for leg in self.legs if leg[0] == node]
            ), node
        open_requests = {
            request for request in self.expected_requests if self.clients[request].end is None
        }
        assert set(brain.list_active_requests()) == open_requests
        assert {leg[1].request_id for leg in self.legs} <= open_requests
        assert brain.queued_requests + brain.running_requests == len(open_requests)

    def teardown(self) -> None:
        """Without any further report every request ends, and nothing is left."""
        self.apply_input(lambda: self.world.advance(41.0))
        assert all(self.clients[request].end is not None for request in self.expected_requests)
        assert self.legs == set()
        assert self.world.count_placed() == 0
        assert self.world.brain.queued_requests == 0


RequestTableMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.data_too_large],
)
TestRequestTable = RequestTableMachine.TestCase
