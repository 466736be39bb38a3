"""The real brain on a virtual clock with prefill and decode nodes that compute nothing: a prompt, a step and a hand-off
take what the costs say. Nodes change their role when they are told to. Minutes of it cost seconds."""

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from baton.errors import BatonError, NodeGone, Rejected
from baton.kv_layout import KVLayout
from baton.pb.cluster_pb2 import NodeStats
from baton.pb.common_pb2 import HandoffReport
from baton.slo import Slo
from baton.types import (
    AttemptKey,
    FinishReason,
    Incarnation,
    NodeName,
    Request,
    RequestId,
    Role,
    SamplingParams,
    TokenEvent,
    Work,
)
from baton.wire import PROTOCOL_VERSION
from benchmarks.schedule import Planned
from coordinator.core import messages as m
from coordinator.core.brain import Brain
from coordinator.core.identity import JoinInfo
from coordinator.core.prefix_aware import PrefixAware
from coordinator.core.registry import Registry
from coordinator.core.settings import Settings
from tests.unit.coordinator_core.world import ticket_for

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=16, dtype="float32")
HEARTBEAT = 1.0  # seconds


@dataclass(frozen=True, slots=True)
class Costs:
    """In seconds. `switch`: from the order to the join in the new role."""

    prompt_token: float = 0.002
    step: float = 0.04
    sequence: float = 0.002
    resident_token: float = 0.0
    handoff: float = 0.01
    switch: float = 0.2


@dataclass(slots=True)
class Seen:
    """What it saw."""

    ask: Planned
    first: float | None = None
    ended: float | None = None
    tokens: int = 0
    error: BatonError | None = None

    def good(self, slo: Slo) -> bool:
        if self.first is None or self.ended is None or self.error is not None:
            return False
        tpot = (self.ended - self.first) / (self.tokens - 1) if self.tokens > 1 else None
        return slo.met(self.first - self.ask.at, tpot)

    def hopeless(self, slo: Slo, now: float) -> bool:
        """It is not good, and will not be."""
        late = self.first is None and slo.ttft is not None and now - self.ask.at > slo.ttft
        return late or (self.ended is not None and not self.good(slo))


@dataclass(slots=True)
class _Node:
    """`jobs` are prompts that wait or are computed (the first), `streams` answers that are written."""

    name: NodeName
    incarnation: Incarnation
    role: Role
    jobs: dict[AttemptKey, tuple[Work, bool]] = field(default_factory=dict)
    promised: dict[AttemptKey, Work] = field(default_factory=dict)
    streams: dict[AttemptKey, Work] = field(default_factory=dict)
    busy: bool = False
    stats: NodeStats = field(default_factory=NodeStats)


class SplitCluster:
    def __init__(
        self,
        prefill: int,
        decode: int,
        costs: Costs | None = None,
        *,
        slots: int = 16,
        blocks: int = 4096,
        seed: int = 0,
        max_queue: int = 4096,
    ) -> None:
        self.now = 0.0
        self.seen: list[Seen] = []
        self.costs = costs or Costs()
        self.brain = Brain(Registry(1e6, 1e6), PrefixAware(), Settings("disaggregated", max_queue, 8, 1e6))
        self._random = random.Random(seed)
        self._slots, self._blocks = slots, blocks
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._serial = count()
        self._open: dict[RequestId, Seen] = {}
        self._nodes: dict[Incarnation, _Node] = {}
        self._keys: dict[AttemptKey, Incarnation] = {}  # the decode node of a hand-off
        for number in range(prefill + decode):
            role = Role.PREFILL if number < prefill else Role.DECODE
            self._join(NodeName(f"n{number}"), role)

    # what a test does

    def at(self, when: float, call: Callable[[], object]) -> None:
        heapq.heappush(self._events, (when, next(self._serial), call))

    def load(self, plan: Iterable[Planned]) -> None:
        for ask in plan:
            self.at(ask.at, lambda ask=ask: self._ask(ask))  # type: ignore[misc]

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, call = heapq.heappop(self._events)
            call()
            due = self.brain.next_due()
            if due is not None and due <= self.now:
                self.carry_out(self.brain.tick(self.now))
        self.now = until

    def share(self, slo: Slo, begin: float = 0.0, end: float = float("inf")) -> float:
        """Of the requests that came in that time, those that were served within the objective."""
        asked = [one for one in self.seen if begin <= one.ask.at < end]
        return sum(one.good(slo) for one in asked) / len(asked)

    # the coordinator's shell

    def carry_out(self, effects: list[m.Effect]) -> None:
        for effect in effects:
            match effect:
                case m.Send(incarnation, message):
                    if incarnation in self._nodes:
                        self._order(self._nodes[incarnation], message)
                case m.Emit(request, tokens, _) if request in self._open:
                    seen = self._open[request]
                    seen.first = self.now if seen.first is None else seen.first
                    seen.tokens += len(tokens)
                case m.End() if effect.request in self._open:
                    seen = self._open.pop(effect.request)
                    seen.ended = self.now
                    seen.error = effect.result if isinstance(effect.result, BatonError) else None
                case _:
                    pass

    def _ask(self, ask: Planned) -> None:
        seen = Seen(ask)
        self.seen.append(seen)
        request = Request(
            id=RequestId(f"r{next(self._serial)}"),
            prompt=(self._random.getrandbits(30), *range(1, ask.prompt_tokens)),
            sampling=SamplingParams(ask.output_tokens, ignore_eos=True),
            timeout=600.0,
        )
        self._open[request.id] = seen
        try:
            effects = self.brain.submit(request, self.now)
        except Rejected as error:
            del self._open[request.id]
            seen.error, seen.ended = error, self.now
            return
        self.carry_out(effects)

    def _say(self, node: _Node, message: m.NodeInput) -> None:
        if node.incarnation in self._nodes:
            self.carry_out(self.brain.receive(node.incarnation, message, self.now))

    # nodes

    def _join(self, name: NodeName, role: Role) -> None:
        node = _Node(name, Incarnation(f"{name}#{next(self._serial)}"), role)
        self._nodes[node.incarnation] = node
        self.carry_out(self.brain.join(self._info(name, role), node.incarnation, self.now))
        self._beat(node)

    def _beat(self, node: _Node) -> None:
        if node.incarnation in self._nodes:
            node.stats.blocks_total = node.stats.blocks_free = self._blocks
            stats = NodeStats()
            stats.CopyFrom(node.stats)
            self._say(node, m.Heartbeat(stats))
            self.at(self.now + HEARTBEAT, lambda: self._beat(node))

    def _order(self, node: _Node, message: m.NodeOrder) -> None:
        match message:
            case m.Submit(work, writer) if writer is not None:
                node.promised[work.key] = work
                self._keys[work.key] = node.incarnation
                ticket = ticket_for(node.incarnation, work.key, writer.incarnation)
                self.at(self.now, lambda: self._say(node, m.Reserved(work.key, ticket, 0)))
            case m.Prefill(work, alone):
                node.jobs[work.key] = (work, alone)
                self._compute(node)
            case m.Cancel(key, _):
                if next(iter(node.jobs), None) != key:
                    node.jobs.pop(key, None)  # the one that is computed goes on, and nobody wants it
                node.promised.pop(key, None)
                node.streams.pop(key, None)
            case m.SetRole(role):
                self.at(self.now + self.costs.switch, lambda: self._switch(node, role))
            case _:
                pass

    def _switch(self, node: _Node, role: Role) -> None:
        del self._nodes[node.incarnation]
        self.carry_out(self.brain.node_gone(node.incarnation, NodeGone("it takes another role"), self.now))
        self._join(node.name, role)

    # prefill

    def _compute(self, node: _Node) -> None:
        if node.busy or not node.jobs:
            return
        node.busy = True
        key, (work, alone) = next(iter(node.jobs.items()))
        seconds = self.costs.prompt_token * len(work.context)
        self.at(self.now + seconds, lambda: self._computed(node, key, work, alone, seconds))

    def _computed(self, node: _Node, key: AttemptKey, work: Work, alone: bool, seconds: float) -> None:
        node.busy = False
        node.jobs.pop(key, None)
        self._say(node, m.PrefillEnded(key, len(work.context), 0, seconds))
        if alone:
            self._say(node, m.Tokens((TokenEvent(key, len(work.emitted), 7, FinishReason.LENGTH),)))
        else:
            self.at(self.now + self.costs.handoff, lambda: self._hand_off(node, key))
        self._compute(node)

    def _hand_off(self, node: _Node, key: AttemptKey) -> None:
        decode = self._nodes.get(self._keys.pop(key, Incarnation("")))
        work = decode.promised.pop(key, None) if decode is not None else None
        if decode is None or work is None:
            return
        decode.streams[key] = work
        report = HandoffReport(bytes=len(work.context), exposed_seconds=self.costs.handoff, transport="shm")
        self._say(decode, m.Admitted(key, 0, 0, len(work.context)))
        self._tokens(decode, [key])
        self._say(node, m.HandedOff(key, report))
        self._step(decode)

    # decode

    def _step(self, node: _Node) -> None:
        if node.busy or not node.streams:
            return
        node.busy = True
        batch = list(node.streams)
        resident = sum(len(work.context) for work in node.streams.values())
        costs = self.costs
        seconds = costs.step + costs.sequence * len(batch) + costs.resident_token * resident
        node.stats.decode_steps += 1
        node.stats.decode_step_seconds += seconds
        node.stats.decode_step_sequences += len(batch)
        node.stats.decode_step_tokens += resident
        self.at(self.now + seconds, lambda: self._stepped(node, batch))

    def _stepped(self, node: _Node, batch: list[AttemptKey]) -> None:
        node.busy = False
        self._tokens(node, [key for key in batch if key in node.streams])
        self._step(node)

    def _tokens(self, node: _Node, keys: list[AttemptKey]) -> None:
        events = []
        for key in keys:
            record = self.brain._table.records.get(key.request)
            if record is None:
                node.streams.pop(key, None)
                continue
            last = record.remaining == 1
            if last:
                node.streams.pop(key)
            events.append(TokenEvent(key, len(record.emitted), 7, FinishReason.LENGTH if last else None))
        if events:
            self._say(node, m.Tokens(tuple(events)))

    def _info(self, name: NodeName, role: Role) -> JoinInfo:
        return JoinInfo(
            protocol_version=PROTOCOL_VERSION,
            name=name,
            role=role,
            host_id="h",
            transfer_endpoint="",
            pid=1,
            model_digest="ab",
            layout=LAYOUT,
            num_blocks=self._blocks,
            max_num_seqs=self._slots,
            max_batched_tokens=512,
            max_model_len=1 << 16,
            vocab_size=1 << 30,
            eos_token_ids=(0,),
            engine="paced",
            process=name,
        )
