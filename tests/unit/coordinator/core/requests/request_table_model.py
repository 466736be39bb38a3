"""The request table, and beside it a model of what may happen.

The model knows what a client may see (each request's tokens in order, without a gap or a repeat,
and one end) and which legs are open: opened by Submit or Prefill, closed by Cancel, by the node's
own last word, or by its death. It also knows which prompt scores have come and where decode has
committed: a prefill leg stays open until both have happened, and another choice of the prompt waits
for the commit.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from baton.cluster_link.messages import (
    AttemptFailed,
    BlocksReserved,
    CancelOrder,
    DecodeOrder,
    DecodeStarted,
    HandoffCompleted,
    PrefillEnded,
    PrefillOrder,
    PromptLogprobsReport,
    ReservationRefused,
    StepTokens,
)
from baton.types import AttemptKey, Incarnation, RequestId, TokenLogprobs
from coordinator.core.common.effects import (
    EmitPromptLogprobs,
    EmitTokens,
    EndRequest,
    FinishedResult,
    MemberLost,
    SendOrder,
)
from coordinator.core.placement.policies import PrefixAwarePolicy
from tests.unit.coordinator.core.brain_harness import DECODE, PREFILL, BrainHarness

ROLES = {"p0": PREFILL, "p1": PREFILL, "d0": DECODE, "d1": DECODE}
PlacedOrder = tuple[Incarnation, DecodeOrder | PrefillOrder]
AttemptReply = (
    BlocksReserved
    | ReservationRefused
    | PromptLogprobsReport
    | StepTokens
    | AttemptFailed
    | PrefillEnded
    | HandoffCompleted
    | DecodeStarted
)


def expected_token(request: RequestId, index: int) -> int:
    return (int(request[1:]) * 100 + index) % 997


def expected_logprobs(request: RequestId, token: int, top: int | None) -> TokenLogprobs | None:
    return None if top is None else TokenLogprobs(-float(token), ((token, -float(token)),) * top)


def expected_prompt_logprobs(
    request: RequestId, length: int, top: int
) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(-float(index), ((index, 0.0),) * top) for index in range(1, length))


@dataclass
class ExpectedRequest:
    """What a request must get. `after` is set if it must wait for that request."""

    prompt: int
    max_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    after: RequestId | None = None


class ClientView:
    """What one client has seen."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self.end: EndRequest | None = None


class RequestTableModel:
    def __init__(self) -> None:
        super().__init__()
        self.world = BrainHarness(
            max_queue=6, max_attempts=3, explain_keep=64, placement=PrefixAwarePolicy()
        )
        self.clients: defaultdict[RequestId, ClientView] = defaultdict(ClientView)
        self.expected_requests: dict[RequestId, ExpectedRequest] = {}
        self.computing_nodes: dict[AttemptKey, Incarnation] = {}
        self.received_prompt_logprobs: defaultdict[AttemptKey, int] = defaultdict(
            int
        )  # prompt scores that have come
        self.buffered_token_counts: defaultdict[AttemptKey, int] = defaultdict(
            int
        )  # tokens of decode that came before them
        self.all_scored: set[RequestId] = set()
        self.committed_attempts: set[AttemptKey] = set()  # committed on decode
        self.legs: set[tuple[Incarnation, AttemptKey]] = set()
        self.decodes: set[tuple[Incarnation, AttemptKey]] = set()
        self.alive: dict[str, Incarnation] = {}
        self.drained: set[str] = set()
        self.speaker = Incarnation("")
        self.new_order_list: list[PlacedOrder] = []

    def apply_input(self, act: Callable[[], object]) -> None:
        """Carry out one input and check its effects, in order."""
        before = len(self.world.effects)
        act()
        for effect in self.world.effects[before:]:
            match effect:
                case SendOrder(node, DecodeOrder() | PrefillOrder() as order):
                    leg = (node, order.work.key)
                    assert self.world.brain.node_registry.nodes[node].info.name not in self.drained
                    assert leg not in self.legs
                    assert (
                        list(order.work.emitted_token_ids)
                        == self.clients[order.work.key.request_id].tokens
                    )
                    self.check_order(order)
                    self.legs.add(leg)
                    if isinstance(order, PrefillOrder) or order.kv_writer is None:
                        self.computing_nodes[order.work.key] = node
                    if isinstance(order, DecodeOrder):
                        self.decodes.add(leg)
                    self.new_order_list.append((node, order))
                case SendOrder(node, CancelOrder(key, _)):
                    assert (node, key) in self.legs, "a leg was cancelled that was not open"
                    self.legs.remove((node, key))
                case EmitPromptLogprobs(request, scores):
                    client, asked = self.clients[request], self.expected_requests[request]
                    assert (client.end, client.prompt_logprobs, client.tokens) == (None, None, [])
                    assert asked.prompt_logprobs is not None
                    assert scores == expected_prompt_logprobs(
                        request, asked.prompt, asked.prompt_logprobs
                    )
                    client.prompt_logprobs = scores
                case EmitTokens(request, tokens, scores):
                    client, asked = self.clients[request], self.expected_requests[request]
                    assert (client.prompt_logprobs is None) == (asked.prompt_logprobs is None)
                    wanted = [expected_logprobs(request, token, asked.logprobs) for token in tokens]
                    assert list(scores) == [score for score in wanted if score is not None]
                    assert client.end is None, "a token after the end"
                    client.tokens += tokens
                    assert client.tokens == [
                        expected_token(request, index) for index in range(len(client.tokens))
                    ]
                    assert len(client.tokens) <= asked.max_tokens
                    for leg in self.decodes & self.legs:
                        if leg[0] == self.speaker and leg[1].request_id == request:
                            self.on_committed(leg[1])
                case EndRequest(request, result):
                    client = self.clients[request]
                    assert client.end is None, "a second end"
                    client.end = effect
                    self.check_explanation(effect)
                    assert effect.output_tokens == len(client.tokens)
                    self.release_followers(request)
                    if isinstance(result, FinishedResult):
                        assert client.tokens
                    else:
                        assert not [leg for leg in self.legs if leg[1].request_id == request]
                    self.legs = {leg for leg in self.legs if leg[1].request_id != request}
                case MemberLost(node):
                    self.legs = {leg for leg in self.legs if leg[0] != node}
                    self.alive = {
                        name: other for name, other in self.alive.items() if other != node
                    }
                case _:
                    pass

    def check_explanation(self, end: EndRequest) -> None:
        told = self.world.explain_request(end.request_id)
        line = told.timeline
        assert line.ttft == pytest.approx(
            end.ttft_seconds if end.ttft_seconds is not None else line.total
        )
        assert (
            line.queue + line.reserve + line.prefill + line.transfer + line.first_token
            == pytest.approx(line.ttft)
        )
        assert line.ttft + told.decode == pytest.approx(line.total)
        assert len(told.attempts) + told.attempts_left_out == line.attempts
        assert all(attempt.ended and attempt.placed <= attempt.over for attempt in told.attempts)
        assert told.output_tokens == end.output_tokens

    def join_node(self, name: str) -> None:
        self.alive.pop(name, None)
        self.alive[name] = self.world.join_node(name, ROLES[name])

    def send_from_node(
        self, node: Incarnation, message: AttemptReply, *, last_word: bool = False
    ) -> None:
        """A report that does not come from an open leg must change nothing."""
        keys = (
            {event.key for event in message.events}
            if isinstance(message, StepTokens)
            else {message.key}
        )
        is_open = all((node, key) in self.legs for key in keys)
        if last_word:
            self.legs -= {(node, key) for key in keys}
        self.speaker = node
        match message:
            case DecodeStarted(key) if (node, key) in self.legs & self.decodes:
                self.on_committed(key)
            case HandoffCompleted(key) if is_open and node == self.computing_nodes.get(key):
                self.on_committed(key)
            case PromptLogprobsReport(key, first, scores) if is_open:
                self.on_prompt_logprobs(node, key, first, len(scores))
            case StepTokens(events) if is_open and self.awaits_prompt_logprobs(
                events[0].key.request_id
            ):
                self.on_early_tokens(node, events[0].key, len(events))
        before = len(self.world.effects)
        self.apply_input(lambda: self.world.send_from_node(node, message))
        assert is_open or len(self.world.effects) == before

    def on_committed(self, key: AttemptKey) -> None:
        """Decode runs it: those that wait for its prompt may go on, and the writer's leg is over
        without a cancel, unless the prompt's scores are still to come."""
        self.committed_attempts.add(key)
        self.release_followers(key.request_id)
        if not self.awaits_prompt_logprobs(key.request_id):
            self.legs = {leg for leg in self.legs if leg[1] != key or leg in self.decodes}

    def release_followers(self, request: RequestId) -> None:
        for asked in self.expected_requests.values():
            if asked.after == request:
                asked.after = None

    def awaits_prompt_logprobs(self, request: RequestId) -> bool:
        asked = self.expected_requests[request]
        return (
            asked.prompt_logprobs is not None
            and asked.prompt > 1
            and request not in self.all_scored
        )

    def check_order(self, order: DecodeOrder | PrefillOrder) -> None:
        request, asked = order.work.request, self.expected_requests[order.work.request.id]
        assert asked.after is None, "placed before the request that it waits for"
        wanted = asked.prompt_logprobs if self.awaits_prompt_logprobs(request.id) else None
        assert request.sampling.prompt_logprobs == wanted
        if isinstance(order, DecodeOrder) and order.kv_writer is None:
            alone = not self.world.brain.node_registry.has_serving_node(PREFILL)
            assert request.choice_index or alone, (
                "only a further choice may do without a prefill node that serves"
            )
            assert wanted is None or alone, "who wants the prompt's scores needs prefill"

    def on_prompt_logprobs(
        self, node: Incarnation, key: AttemptKey, first: int, count: int
    ) -> None:
        """Honest ones, from the node that computes the prompt: the next of them."""
        if (
            node != self.computing_nodes[key]
            or not self.awaits_prompt_logprobs(key.request_id)
            or first != self.received_prompt_logprobs[key] + 1
        ):
            return
        self.received_prompt_logprobs[key] += count
        if self.received_prompt_logprobs[key] == self.expected_requests[key.request_id].prompt - 1:
            self.all_scored.add(key.request_id)
            if key in self.committed_attempts:
                self.on_committed(key)

    def on_early_tokens(self, node: Incarnation, key: AttemptKey, count: int) -> None:
        self.buffered_token_counts[key] += count
        if (
            node != self.computing_nodes[key]
            and self.buffered_token_counts[key] <= self.expected_requests[key.request_id].max_tokens
        ):
            self.on_committed(key)
