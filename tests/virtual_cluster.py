"""The real brain and the real schedulers on a virtual clock: nothing computes, every step takes what a cost model says.

With `prefill` nodes, prompts are handed over: that takes `link` seconds after the last chunk. Time passes from event to
event, and minutes of it cost seconds. Tokens are all the same; what is looked at is who is served when.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Literal

from baton.block_hash import BlockHash
from baton.errors import BatonError, Rejected
from baton.pb.cluster_pb2 import NodeStats
from baton.pb.common_pb2 import HandoffReport
from baton.types import AttemptKey, Incarnation, NodeName, Request, RequestId, Role, SamplingParams, TokenEvent, Work
from baton.wire import PROTOCOL_VERSION
from coordinator.core import messages as m
from coordinator.core.brain import Brain
from coordinator.core.identity import JoinInfo
from coordinator.core.prefix_aware import PrefixAware
from coordinator.core.registry import Registry
from coordinator.core.settings import Settings
from coordinator.core.tenants import Tenants
from node_engine.core.block_pool import BlockPool
from node_engine.core.device_time import DeviceTime
from node_engine.core.outcome import Emitted, Failed, Outcome, PrefillCompleted
from node_engine.core.residency import Refusal
from node_engine.core.scheduler import Scheduler, SchedulerLimits
from node_engine.core.step import Computed, StepBatch
from node_engine.core.step_meter import StepTotals
from node_engine.paced import PACED_LAYOUT, PacedCosts
from tests.unit.coordinator_core.world import ticket_for

HEARTBEAT = 0.5  # seconds


@dataclass(slots=True)
class Served:
    """What one client saw. Times are the cluster's; `error` also when it was turned away."""

    tenant: str
    arrived: float
    prompt: int
    first: float | None = None
    ended: float | None = None
    tokens: int = 0
    error: BatonError | None = None

    @property
    def ttft(self) -> float:
        assert self.first is not None, self
        return self.first - self.arrived

    @property
    def done(self) -> bool:
        return self.ended is not None and self.error is None


@dataclass(slots=True)
class _Node:
    incarnation: Incarnation
    pool: BlockPool
    scheduler: Scheduler
    role: Role = Role.DECODE
    time: DeviceTime = field(default_factory=DeviceTime)
    steps: StepTotals = field(default_factory=StepTotals)
    stepping: bool = False
    admitted: set[object] = field(default_factory=set)
    shares: dict[object, float] = field(default_factory=dict)  # seconds of the steps that computed prompts

    def took(self, batch: StepBatch, seconds: float) -> None:
        self.time.add(batch, self.scheduler.computing, seconds)
        self.steps = self.steps.plus(batch, seconds)
        for piece in batch.slices:
            key = self.scheduler.computing(piece.sequence).key
            if key not in self.admitted:
                share = seconds * self.scheduler.allowance.share_of(batch, len(piece.tokens))
                self.shares[key] = self.shares.get(key, 0.0) + share
        self.scheduler.allowance.took(batch, seconds)


class VirtualCluster:
    def __init__(
        self,
        *,
        nodes: int = 1,
        prefill: int = 0,
        mode: Literal["disaggregated", "colocated", "auto"] = "colocated",
        prefill_share: float = 0.5,
        link: float = 0.002,
        tenants: Tenants | None = None,
        blocks: int = 4096,
        max_num_seqs: int = 32,
        max_batched_tokens: int = 512,
        max_queue: int = 1024,
        costs: PacedCosts | None = None,
        seed: int = 0,
    ) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self._seed = seed
        self.served: dict[RequestId, Served] = {}
        self.refused: list[Served] = []
        self.most_waiting = 0
        self.last_token = 0.0
        self.longest_silence = 0.0
        self.slowness: dict[str, float] = {}  # of nodes by name: so many times as slow as the others
        self.given: list[tuple[float, str]] = []  # to which node an attempt was given, and when
        self.on_end: Callable[[Served], None] = lambda _: None
        self._costs = costs or PacedCosts()
        self._link = link
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._serial = count()
        self.brain = Brain(
            Registry(1e6, 1e6), PrefixAware(), Settings(mode, max_queue, 8, 15.0, prefill_share=prefill_share)
        )
        if tenants is not None:
            self.brain.reload_tenants(tenants, 0.0)
        self.tenants = tenants or Tenants()
        self._nodes: dict[Incarnation, _Node] = {}
        limits = SchedulerLimits(max_num_seqs, max_batched_tokens, 1 << 16)
        for number in range(nodes + prefill):
            pool = BlockPool(blocks, PACED_LAYOUT.block_size, lambda: self.now)
            role = Role.DECODE if number < nodes else Role.PREFILL
            node = _Node(Incarnation(f"{role.value[0]}{number}"), pool, Scheduler(pool, limits), role)
            self._nodes[node.incarnation] = node
            self._carry_out(self.brain.join(_info(node.incarnation, role, blocks, limits), node.incarnation, 0.0))
            self._beat(node)

    # what a test does

    def at(self, when: float, call: Callable[[], object]) -> None:
        heapq.heappush(self._events, (when, next(self._serial), call))

    def ask(
        self, tenant: str = "default", prompt: int = 64, output: int = 8, timeout: float = 600.0, priority: int = 0
    ) -> Served:
        """A request arrives now."""
        served = Served(tenant, self.now, prompt)
        known = self.tenants.get(tenant)
        number = next(self._serial)
        request = Request(
            id=RequestId(f"r{number}"),
            prompt=tuple(self.random.choices(range(1, 1000), k=prompt)),
            sampling=SamplingParams(output),
            timeout=timeout,
            cache_salt=known.salt,
            standing=self.tenants.standing(known, priority),
        )
        self.served[request.id] = served
        try:
            effects = self.brain.submit(request, self.now)
        except Rejected as error:
            del self.served[request.id]
            served.error, served.ended = error, self.now
            self.refused.append(served)
            self.on_end(served)
            return served
        self.most_waiting = max(self.most_waiting, self.brain.queued)
        self._carry_out(effects)
        return served

    def load(
        self,
        rate: float,
        until: float,
        *,
        start: float = 0.0,
        tenant: str = "default",
        prompt: int = 64,
        output: int = 8,
        vary: bool = False,
        timeout: float = 600.0,
    ) -> None:
        """Poisson arrivals; with `vary` outputs are uniform around `output`."""
        draw, when = random.Random(f"{tenant} {self._seed}"), start
        while (when := when + draw.expovariate(rate)) < until:
            tokens = draw.randint(output // 4, 2 * output - output // 4) if vary else output
            self.at(when, partial(self.ask, tenant, prompt, tokens, timeout))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, call = heapq.heappop(self._events)
            call()
            due = self.brain.next_due()
            if due is not None and due <= self.now:
                self._carry_out(self.brain.tick(self.now))
        self.now = until

    def done(self, tenant: str | None = None, since: float = 0.0) -> list[Served]:
        everyone = [each for each in self.served.values() if tenant in (None, each.tenant)]
        return [each for each in everyone if each.done and each.arrived >= since]

    def device_seconds(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for node in self._nodes.values():
            for name, seconds in node.time.counters().items():
                total[name] = total.get(name, 0.0) + seconds
        return total

    # the coordinator's shell

    def _carry_out(self, effects: list[m.Effect]) -> None:
        for effect in effects:
            match effect:
                case m.Send(node, message):
                    self._order(self._nodes[node], message)
                case m.Emit(request, tokens, _):
                    served = self.served[request]
                    served.first = self.now if served.first is None else served.first
                    served.tokens += len(tokens)
                    self.longest_silence = max(self.longest_silence, self.now - self.last_token)
                    self.last_token = self.now
                case m.End():
                    served = self.served[effect.request]
                    served.ended = self.now
                    served.error = effect.result if isinstance(effect.result, BatonError) else None
                    self.on_end(served)
                case _:
                    pass

    def _say(self, node: _Node, message: m.NodeInput) -> None:
        self._carry_out(self.brain.receive(node.incarnation, message, self.now))

    # a node

    def _order(self, node: _Node, message: m.NodeOrder) -> None:
        if isinstance(message, m.Prefill | m.Submit):
            self.given.append((self.now, node.incarnation))
        if isinstance(message, m.Cancel):
            node.scheduler.cancel(message.key)
        elif isinstance(message, m.Prefill):
            node.scheduler.add(message.work, _root(message.work), hand_off=True)
            self._wake(node)
        elif isinstance(message, m.Submit) and message.writer is not None:
            self._reserve(node, message.work, message.writer.incarnation)
        elif isinstance(message, m.GiveTicket):
            node.scheduler.ticket_arrived(message.ticket.key)
        elif isinstance(message, m.Submit):
            node.scheduler.allowance.share = message.prefill_share or None
            root = _root(message.work)
            survey = node.scheduler.survey(message.work, root)
            if survey.refusal is None:
                node.scheduler.add(message.work, root)
                self._wake(node)
            else:
                refused = m.Refused(message.work.key, survey.refusal.needed_blocks, survey.refusal.free_blocks)
                self.at(self.now, lambda: self._say(node, refused))

    def _reserve(self, node: _Node, work: Work, writer: Incarnation) -> None:
        ticket = ticket_for(node.incarnation, work.key, writer)
        found = node.scheduler.expect(work, _root(work), ticket.id)
        answer: m.NodeInput = m.Reserved(work.key, ticket, 0)
        if isinstance(found, Refusal):
            answer = m.Refused(work.key, found.needed_blocks, found.free_blocks)
        self.at(self.now, lambda: self._say(node, answer))

    def _wake(self, node: _Node) -> None:
        if not node.stepping:
            node.stepping = True
            self.at(self.now, lambda: self._step(node))

    def _step(self, node: _Node) -> None:
        plan = node.scheduler.next_step()
        batch = plan.batch
        if batch is None:
            node.stepping = False
        else:
            seconds = self._costs.seconds(batch) * self.slowness.get(node.incarnation, 1.0)

            def ended() -> None:
                node.took(batch, seconds)
                computed = [Computed(7 if piece.sample else None) for piece in batch.slices]
                self._tell(node, node.scheduler.update(batch, computed))
                self._step(node)

            self.at(self.now + seconds, ended)
        self._tell(node, plan.outcomes)

    def _tell(self, node: _Node, outcomes: "list[Outcome] | tuple[Outcome, ...]") -> None:
        events: list[TokenEvent] = []
        for outcome in outcomes:
            match outcome:
                case Emitted(sequence, event):
                    if sequence.key not in node.admitted:
                        node.admitted.add(sequence.key)
                        cached, share = sequence.num_cached, node.shares.pop(sequence.key)
                        self._say(node, m.Admitted(sequence.key, sequence.context_len - cached, cached, 0, share))
                    events.append(event)
                case Failed(sequence, error, caused_by):
                    node.shares.pop(sequence.key, None)
                    self._say(node, m.AttemptFailed(sequence.key, error, caused_by))
                case PrefillCompleted(sequence, event):
                    cached, share = sequence.num_cached, node.shares.pop(sequence.key)
                    self._say(node, m.PrefillEnded(sequence.key, sequence.context_len - cached, cached, share))
                    self.at(self.now + self._link, partial(self._hand_over, node, sequence.key, event))
                case _:
                    raise AssertionError(outcome)
        if events:
            self._say(node, m.Tokens(tuple(events)))

    def _hand_over(self, writer: _Node, key: AttemptKey, event: TokenEvent) -> None:
        ticket = ticket_for(Incarnation(""), key, writer.incarnation).id
        decode = next(node for node in self._nodes.values() if node is not writer and node.scheduler.get(key))
        decode.pool.mark_writing(ticket)
        decode.admitted.add(key)
        outcomes = decode.scheduler.adopt(key, (event.token,))
        writer.scheduler.release(key)
        sequence = next(outcome.sequence for outcome in outcomes if isinstance(outcome, Emitted))
        self._say(decode, m.Admitted(key, 0, 0, sequence.context_len))
        size = sequence.context_len * PACED_LAYOUT.token_bytes
        report = HandoffReport(transport="shm", bytes=size, exposed_seconds=self._link)
        self._say(writer, m.HandedOff(key, report))
        self._tell(decode, outcomes)
        self._wake(decode)

    def _beat(self, node: _Node) -> None:
        counts = {f"blocks_{state.value}": number for state, number in node.pool.counts().items()}
        stats = NodeStats(
            blocks_total=node.pool.total,
            decode_steps=node.steps.steps,
            decode_step_seconds=node.steps.seconds,
            decode_step_sequences=node.steps.sequences,
            decode_step_tokens=node.steps.tokens,
            **counts,
        )
        self._say(node, m.Heartbeat(stats))
        self.at(self.now + HEARTBEAT, lambda: self._beat(node))


def _root(work: Work) -> BlockHash:
    return BlockHash(work.request.cache_salt.ljust(32, b"\0"))


def _info(name: str, role: Role, blocks: int, limits: SchedulerLimits) -> JoinInfo:
    return JoinInfo(
        protocol_version=PROTOCOL_VERSION,
        name=NodeName(name),
        role=role,
        host_id="h",
        transfer_endpoint="",
        pid=1,
        model_digest="ab",
        layout=PACED_LAYOUT,
        num_blocks=blocks,
        max_num_seqs=limits.max_num_seqs,
        max_batched_tokens=limits.max_batched_tokens,
        max_model_len=limits.max_model_len,
        vocab_size=1000,
        eos_token_ids=(0,),
        engine="paced",
        process=name,
    )


def percentile(values: list[float], share: float) -> float:
    """The smallest of `values` that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
