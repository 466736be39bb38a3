"""The real brain on a virtual clock with prefill and decode nodes that compute nothing: a prompt, a
step and a hand-off take what the costs say. Nodes change their role when they are told to. Minutes
of it cost seconds."""

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from baton.cluster_link.messages import (
    PROTOCOL_VERSION,
    BlocksReserved,
    CancelOrder,
    DecodeOrder,
    DecodeStarted,
    HandoffCompleted,
    Heartbeat,
    JoinInfo,
    NodeOrder,
    NodeReport,
    PrefillEnded,
    PrefillOrder,
    SetRoleOrder,
    StepTokens,
)
from baton.errors import BatonError, NodeLost, RequestRejected
from baton.kv.kv_layout import KVLayout
from baton.pb.cluster_pb2 import NodeStats
from baton.pb.common_pb2 import HandoffReport
from baton.slo import Slo
from baton.types import (
    AttemptKey,
    AttemptSpec,
    FinishReason,
    Incarnation,
    NodeName,
    Request,
    RequestId,
    Role,
    SamplingParams,
    TokenEvent,
)
from benchmarks.load.request_plan import PlannedRequest
from coordinator.core.brain import Brain
from coordinator.core.common.effects import Effect, EmitTokens, EndRequest, SendOrder
from coordinator.core.common.settings import BrainSettings
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.placement.policies import PrefixAwarePolicy
from tests.unit.coordinator.core.brain_harness import make_ticket

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=16, dtype="float32")
HEARTBEAT = 1.0  # seconds


@dataclass(frozen=True, slots=True)
class SimulatedCosts:
    """In seconds. `role_switch_seconds`: from the order to the join in the new role."""

    prompt_token_seconds: float = 0.002
    step_seconds: float = 0.04
    sequence_seconds: float = 0.002
    resident_token_seconds: float = 0.0
    handoff_seconds: float = 0.01
    role_switch_seconds: float = 0.2


@dataclass(slots=True)
class SimulatedRequest:
    """What it saw."""

    planned: PlannedRequest
    first_token_at: float | None = None
    ended_at: float | None = None
    token_count: int = 0
    error: BatonError | None = None

    def meets_slo(self, slo: Slo) -> bool:
        if self.first_token_at is None or self.ended_at is None or self.error is not None:
            return False
        tpot = (
            (self.ended_at - self.first_token_at) / (self.token_count - 1)
            if self.token_count > 1
            else None
        )
        return slo.is_met(self.first_token_at - self.planned.start_seconds, tpot)

    def has_missed_slo(self, slo: Slo, now: float) -> bool:
        """It is not good, and will not be."""
        late = (
            self.first_token_at is None
            and slo.ttft_seconds is not None
            and now - self.planned.start_seconds > slo.ttft_seconds
        )
        return late or (self.ended_at is not None and not self.meets_slo(slo))


@dataclass(slots=True)
class _CostModelNode:
    """`prefills` are prompts that wait or are computed (the first), `decodes` answers that are
    written."""

    name: NodeName
    incarnation: Incarnation
    role: Role
    prefills: dict[AttemptKey, tuple[AttemptSpec, bool]] = field(default_factory=dict)
    reserved: dict[AttemptKey, AttemptSpec] = field(default_factory=dict)
    decodes: dict[AttemptKey, AttemptSpec] = field(default_factory=dict)
    is_busy: bool = False
    stats: NodeStats = field(default_factory=NodeStats)


class CostModelCluster:
    def __init__(
        self,
        prefill: int,
        decode: int,
        costs: SimulatedCosts | None = None,
        *,
        slots: int = 16,
        blocks: int = 4096,
        seed: int = 0,
        max_queue: int = 4096,
    ) -> None:
        self.now = 0.0
        self.requests: list[SimulatedRequest] = []
        self.costs = costs or SimulatedCosts()
        self.brain = Brain(
            NodeRegistry(1e6, 1e6),
            PrefixAwarePolicy(),
            BrainSettings(
                mode="disaggregated", max_queue=max_queue, max_attempts=8, reserve_timeout=1e6
            ),
        )
        self._random = random.Random(seed)
        self._slots, self._blocks = slots, blocks
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._serial = count()
        self._open: dict[RequestId, SimulatedRequest] = {}
        self._nodes: dict[Incarnation, _CostModelNode] = {}
        self._keys: dict[AttemptKey, Incarnation] = {}  # the decode node of a hand-off
        for number in range(prefill + decode):
            role = Role.PREFILL if number < prefill else Role.DECODE
            self._join(NodeName(f"n{number}"), role)

    # what a test does

    def call_at(self, when: float, call: Callable[[], object]) -> None:
        heapq.heappush(self._events, (when, next(self._serial), call))

    def schedule_requests(self, plan: Iterable[PlannedRequest]) -> None:
        for ask in plan:
            self.call_at(ask.start_seconds, partial(self._submit_request, ask))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, call = heapq.heappop(self._events)
            call()
            due = self.brain.next_tick_at()
            if due is not None and due <= self.now:
                self.apply_effects(self.brain.tick(self.now))
        self.now = until

    def slo_attainment(self, slo: Slo, begin: float = 0.0, end: float = float("inf")) -> float:
        """Of the requests that came in that time, those that were served within the objective."""
        asked = [one for one in self.requests if begin <= one.planned.start_seconds < end]
        return sum(one.meets_slo(slo) for one in asked) / len(asked)

    # the coordinator's shell

    def apply_effects(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendOrder(incarnation, message):
                    if incarnation in self._nodes:
                        self._on_order(self._nodes[incarnation], message)
                case EmitTokens(request, tokens, _) if request in self._open:
                    seen = self._open[request]
                    seen.first_token_at = (
                        self.now if seen.first_token_at is None else seen.first_token_at
                    )
                    seen.token_count += len(tokens)
                case EndRequest() if effect.request_id in self._open:
                    seen = self._open.pop(effect.request_id)
                    seen.ended_at = self.now
                    seen.error = effect.result if isinstance(effect.result, BatonError) else None
                case _:
                    pass

    def _submit_request(self, ask: PlannedRequest) -> None:
        seen = SimulatedRequest(ask)
        self.requests.append(seen)
        request = Request(
            id=RequestId(f"r{next(self._serial)}"),
            prompt_token_ids=(self._random.getrandbits(30), *range(1, ask.prompt_tokens)),
            sampling=SamplingParams(ask.output_tokens, ignore_eos=True),
            timeout_seconds=600.0,
        )
        self._open[request.id] = seen
        try:
            effects = self.brain.submit_request(request, self.now)
        except RequestRejected as error:
            del self._open[request.id]
            seen.error, seen.ended_at = error, self.now
            return
        self.apply_effects(effects)

    def _send_to_brain(self, node: _CostModelNode, message: NodeReport) -> None:
        if node.incarnation in self._nodes:
            self.apply_effects(self.brain.receive_report(node.incarnation, message, self.now))

    # nodes

    def _join(self, name: NodeName, role: Role) -> None:
        node = _CostModelNode(name, Incarnation(f"{name}#{next(self._serial)}"), role)
        self._nodes[node.incarnation] = node
        self.apply_effects(
            self.brain.join_node(self._join_info(name, role), node.incarnation, self.now)
        )
        self._send_heartbeat(node)

    def _send_heartbeat(self, node: _CostModelNode) -> None:
        if node.incarnation in self._nodes:
            node.stats.blocks_total = node.stats.blocks_free = self._blocks
            stats = NodeStats()
            stats.CopyFrom(node.stats)
            self._send_to_brain(node, Heartbeat(stats))
            self.call_at(self.now + HEARTBEAT, lambda: self._send_heartbeat(node))

    def _on_order(self, node: _CostModelNode, message: NodeOrder) -> None:
        match message:
            case DecodeOrder(work, writer) if writer is not None:
                node.reserved[work.key] = work
                self._keys[work.key] = node.incarnation
                ticket = make_ticket(node.incarnation, work.key, writer.incarnation)
                self.call_at(
                    self.now,
                    lambda: self._send_to_brain(node, BlocksReserved(work.key, ticket, 0)),
                )
            case PrefillOrder(work, alone):
                node.prefills[work.key] = (work, alone)
                self._start_prefill(node)
            case CancelOrder(key, _):
                if next(iter(node.prefills), None) != key:
                    node.prefills.pop(
                        key, None
                    )  # the one that is computed goes on, and nobody wants it
                node.reserved.pop(key, None)
                node.decodes.pop(key, None)
            case SetRoleOrder(role):
                self.call_at(
                    self.now + self.costs.role_switch_seconds, lambda: self._switch(node, role)
                )
            case _:
                pass

    def _switch(self, node: _CostModelNode, role: Role) -> None:
        del self._nodes[node.incarnation]
        self.apply_effects(
            self.brain.remove_member(node.incarnation, NodeLost("it takes another role"), self.now)
        )
        self._join(node.name, role)

    # prefill

    def _start_prefill(self, node: _CostModelNode) -> None:
        if node.is_busy or not node.prefills:
            return
        node.is_busy = True
        key, (work, alone) = next(iter(node.prefills.items()))
        seconds = self.costs.prompt_token_seconds * len(work.context_token_ids)
        self.call_at(
            self.now + seconds, lambda: self._finish_prefill(node, key, work, alone, seconds)
        )

    def _finish_prefill(
        self, node: _CostModelNode, key: AttemptKey, work: AttemptSpec, alone: bool, seconds: float
    ) -> None:
        node.is_busy = False
        node.prefills.pop(key, None)
        self._send_to_brain(node, PrefillEnded(key, len(work.context_token_ids), 0, seconds))
        if alone:
            self._send_to_brain(
                node,
                StepTokens((TokenEvent(key, len(work.emitted_token_ids), 7, FinishReason.LENGTH),)),
            )
        else:
            self.call_at(
                self.now + self.costs.handoff_seconds, lambda: self._finish_handoff(node, key)
            )
        self._start_prefill(node)

    def _finish_handoff(self, node: _CostModelNode, key: AttemptKey) -> None:
        decode = self._nodes.get(self._keys.pop(key, Incarnation("")))
        work = decode.reserved.pop(key, None) if decode is not None else None
        if decode is None or work is None:
            return
        decode.decodes[key] = work
        report = HandoffReport(
            bytes=len(work.context_token_ids),
            exposed_seconds=self.costs.handoff_seconds,
            transport="shm",
        )
        self._send_to_brain(decode, DecodeStarted(key, 0, 0, len(work.context_token_ids)))
        self._emit_tokens(decode, [key])
        self._send_to_brain(node, HandoffCompleted(key, report))
        self._start_decode_step(decode)

    # decode

    def _start_decode_step(self, node: _CostModelNode) -> None:
        if node.is_busy or not node.decodes:
            return
        node.is_busy = True
        batch = list(node.decodes)
        resident = sum(len(work.context_token_ids) for work in node.decodes.values())
        costs = self.costs
        seconds = (
            costs.step_seconds
            + costs.sequence_seconds * len(batch)
            + costs.resident_token_seconds * resident
        )
        node.stats.decode_steps += 1
        node.stats.decode_step_seconds += seconds
        node.stats.decode_step_sequences += len(batch)
        node.stats.decode_step_tokens += resident
        self.call_at(self.now + seconds, lambda: self._finish_decode_step(node, batch))

    def _finish_decode_step(self, node: _CostModelNode, batch: list[AttemptKey]) -> None:
        node.is_busy = False
        self._emit_tokens(node, [key for key in batch if key in node.decodes])
        self._start_decode_step(node)

    def _emit_tokens(self, node: _CostModelNode, keys: list[AttemptKey]) -> None:
        events = []
        for key in keys:
            record = self.brain._table.records.get(key.request_id)
            if record is None:
                node.decodes.pop(key, None)
                continue
            last = record.remaining_tokens == 1
            if last:
                node.decodes.pop(key)
            events.append(
                TokenEvent(
                    key, len(record.emitted_token_ids), 7, FinishReason.LENGTH if last else None
                )
            )
        if events:
            self._send_to_brain(node, StepTokens(tuple(events)))

    def _join_info(self, name: NodeName, role: Role) -> JoinInfo:
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
