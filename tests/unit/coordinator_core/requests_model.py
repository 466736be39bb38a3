"""The request table, and beside it a model of what may happen.

The model knows what a client may see (each request's tokens in order, without a gap or a repeat, and one end) and which
legs are open: opened by Submit or Prefill, closed by Cancel, by the node's own last word, or by its death. It also
knows which prompt scores have come and where decode has committed: a prefill leg stays open until both have happened,
and another choice of the prompt waits for the commit.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from baton.types import AttemptKey, Incarnation, RequestId, TokenScore
from coordinator.core import messages as m
from coordinator.core.prefix_aware import PrefixAware
from tests.unit.coordinator_core.world import DECODE, PREFILL, World

ROLES = {"p0": PREFILL, "p1": PREFILL, "d0": DECODE, "d1": DECODE}
Order = tuple[Incarnation, m.Submit | m.Prefill]
Answer = (
    m.Reserved | m.Refused | m.PromptScores | m.Tokens | m.AttemptFailed | m.PrefillEnded | m.HandedOff | m.Admitted
)


def truth(request: RequestId, index: int) -> int:
    return (int(request[1:]) * 100 + index) % 997


def score_of(request: RequestId, token: int, top: int | None) -> TokenScore | None:
    return None if top is None else TokenScore(-float(token), ((token, -float(token)),) * top)


def prompt_scores(request: RequestId, length: int, top: int) -> tuple[TokenScore, ...]:
    return tuple(TokenScore(-float(index), ((index, 0.0),) * top) for index in range(1, length))


@dataclass
class Asked:
    """What a request wants. `after` is set if it must wait for that one."""

    prompt: int
    max_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    after: RequestId | None = None


class Client:
    """What one client has seen."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.prompt_scores: tuple[TokenScore, ...] | None = None
        self.end: m.End | None = None


class RequestTableModel:
    def __init__(self) -> None:
        super().__init__()
        self.world = World(max_queue=6, max_attempts=3, explain_keep=64, placement=PrefixAware())
        self.clients: defaultdict[RequestId, Client] = defaultdict(Client)
        self.asked: dict[RequestId, Asked] = {}
        self.computes: dict[AttemptKey, Incarnation] = {}
        self.scored: defaultdict[AttemptKey, int] = defaultdict(int)  # prompt scores that have come
        self.held: defaultdict[AttemptKey, int] = defaultdict(int)  # tokens of decode that came before them
        self.all_scored: set[RequestId] = set()
        self.runs: set[AttemptKey] = set()  # committed on decode
        self.legs: set[tuple[Incarnation, AttemptKey]] = set()
        self.decodes: set[tuple[Incarnation, AttemptKey]] = set()
        self.alive: dict[str, Incarnation] = {}
        self.drained: set[str] = set()
        self.speaker = Incarnation("")
        self.fresh: list[Order] = []

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
                    self.placed(order)
                    self.legs.add(leg)
                    if isinstance(order, m.Prefill) or order.writer is None:
                        self.computes[order.work.key] = node
                    if isinstance(order, m.Submit):
                        self.decodes.add(leg)
                    self.fresh.append((node, order))
                case m.Send(node, m.Cancel(key, _)):
                    assert (node, key) in self.legs, "a leg was cancelled that was not open"
                    self.legs.remove((node, key))
                case m.EmitPromptScores(request, scores):
                    client, asked = self.clients[request], self.asked[request]
                    assert (client.end, client.prompt_scores, client.tokens) == (None, None, [])
                    assert asked.prompt_logprobs is not None
                    assert scores == prompt_scores(request, asked.prompt, asked.prompt_logprobs)
                    client.prompt_scores = scores
                case m.Emit(request, tokens, scores):
                    client, asked = self.clients[request], self.asked[request]
                    assert (client.prompt_scores is None) == (asked.prompt_logprobs is None)
                    wanted = [score_of(request, token, asked.logprobs) for token in tokens]
                    assert list(scores) == [score for score in wanted if score is not None]
                    assert client.end is None, "a token after the end"
                    client.tokens += tokens
                    assert client.tokens == [truth(request, index) for index in range(len(client.tokens))]
                    assert len(client.tokens) <= asked.max_tokens
                    for leg in self.decodes & self.legs:
                        if leg[0] == self.speaker and leg[1].request == request:
                            self.committed(leg[1])
                case m.End(request, result):
                    client = self.clients[request]
                    assert client.end is None, "a second end"
                    client.end = effect
                    self.explained(effect)
                    assert effect.tokens == len(client.tokens)
                    self.free(request)
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
        match message:
            case m.Admitted(key) if (node, key) in self.legs & self.decodes:
                self.committed(key)
            case m.HandedOff(key) if is_open and node == self.computes.get(key):
                self.committed(key)
            case m.PromptScores(key, first, scores) if is_open:
                self.scores_come(node, key, first, len(scores))
            case m.Tokens(events) if is_open and self.awaits_scores(events[0].key.request):
                self.tokens_come_early(node, events[0].key, len(events))
        before = len(self.world.effects)
        self.do(lambda: self.world.say(node, message))
        assert is_open or len(self.world.effects) == before

    def committed(self, key: AttemptKey) -> None:
        """Decode runs it: those that wait for its prompt may go on, and the writer's leg is over without a cancel,
        unless the prompt's scores are still to come."""
        self.runs.add(key)
        self.free(key.request)
        if not self.awaits_scores(key.request):
            self.legs = {leg for leg in self.legs if leg[1] != key or leg in self.decodes}

    def free(self, request: RequestId) -> None:
        for asked in self.asked.values():
            if asked.after == request:
                asked.after = None

    def awaits_scores(self, request: RequestId) -> bool:
        asked = self.asked[request]
        return asked.prompt_logprobs is not None and asked.prompt > 1 and request not in self.all_scored

    def placed(self, order: m.Submit | m.Prefill) -> None:
        request, asked = order.work.request, self.asked[order.work.request.id]
        assert asked.after is None, "placed before the request that it waits for"
        wanted = asked.prompt_logprobs if self.awaits_scores(request.id) else None
        assert request.sampling.prompt_logprobs == wanted
        if isinstance(order, m.Submit) and order.writer is None:
            alone = not self.world.brain.registry.serves(PREFILL)
            assert request.choice or alone, "only a further choice may do without a prefill node that serves"
            assert wanted is None or alone, "who wants the prompt's scores needs prefill"

    def scores_come(self, node: Incarnation, key: AttemptKey, first: int, count: int) -> None:
        """Honest ones, from the node that computes the prompt: the next of them."""
        if node != self.computes[key] or not self.awaits_scores(key.request) or first != self.scored[key] + 1:
            return
        self.scored[key] += count
        if self.scored[key] == self.asked[key.request].prompt - 1:
            self.all_scored.add(key.request)
            if key in self.runs:
                self.committed(key)

    def tokens_come_early(self, node: Incarnation, key: AttemptKey, count: int) -> None:
        self.held[key] += count
        if node != self.computes[key] and self.held[key] <= self.asked[key.request].max_tokens:
            self.committed(key)
