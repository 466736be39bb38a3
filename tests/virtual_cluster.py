"""The real brain and the real schedulers on a virtual clock: nothing computes, every step takes
what a cost model says.

With `prefill` nodes, prompts are handed over: that takes `link` seconds after the last chunk. Time
passes from event to event, and minutes of it cost seconds. Tokens are all the same; what is looked
at is who is served when.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Literal

from baton.cluster_link.messages import (
    AttemptFailed,
    BlocksReserved,
    CancelOrder,
    DecodeOrder,
    DecodeStarted,
    HandoffCompleted,
    Heartbeat,
    NodeOrder,
    NodeReport,
    PrefillEnded,
    PrefillOrder,
    ReservationRefused,
    StepTokens,
    TicketOrder,
)
from baton.errors import BatonError, RequestRejected
from baton.kv.block_hash import BlockHash
from baton.pb.cluster_pb2 import NodeStats
from baton.pb.common_pb2 import HandoffReport
from baton.types import (
    AttemptKey,
    AttemptSpec,
    Incarnation,
    Request,
    RequestId,
    Role,
    SamplingParams,
    TokenEvent,
)
from coordinator.core.admission.tenants import TenantTable
from coordinator.core.brain import Brain
from coordinator.core.common.effects import Effect, EmitTokens, EndRequest, SendOrder
from coordinator.core.common.settings import BrainSettings
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.placement.policies import PrefixAwarePolicy
from node_engine.core.blocks.block_pool import BlockPool
from node_engine.core.metrics.decode_step_totals import DecodeStepTotals
from node_engine.core.metrics.device_time import DeviceTime
from node_engine.core.scheduling.capacity import CapacityRefusal, SchedulerLimits
from node_engine.core.scheduling.scheduler import Scheduler
from node_engine.core.sequences.outcomes import (
    PrefillCompleted,
    SequenceFailed,
    SequenceOutcome,
    TokenEmitted,
)
from node_engine.core.step.step_batch import SliceResult, StepBatch
from node_engine.paced.paced_engine import PACED_LAYOUT, PacedCosts
from tests.unit.coordinator.core.brain_harness import make_join_info, make_ticket

HEARTBEAT = 0.5  # seconds


@dataclass(slots=True)
class VirtualRequest:
    """What one client saw. Times are the cluster's; `error` also when it was turned away."""

    tenant: str
    arrived_at: float
    prompt_tokens: int
    first_token_at: float | None = None
    ended_at: float | None = None
    token_count: int = 0
    error: BatonError | None = None

    @property
    def ttft_seconds(self) -> float:
        assert self.first_token_at is not None, self
        return self.first_token_at - self.arrived_at

    @property
    def is_done(self) -> bool:
        return self.ended_at is not None and self.error is None


@dataclass(slots=True)
class _VirtualNode:
    incarnation: Incarnation
    pool: BlockPool
    scheduler: Scheduler
    role: Role = Role.DECODE
    device_time: DeviceTime = field(default_factory=DeviceTime)
    step_totals: DecodeStepTotals = field(default_factory=DecodeStepTotals)
    is_stepping: bool = False
    admitted: set[object] = field(default_factory=set)
    prefill_seconds: dict[object, float] = field(
        default_factory=dict
    )  # seconds of the steps that computed prompts

    def record_step(self, batch: StepBatch, seconds: float) -> None:
        self.device_time.charge_step(batch, self.scheduler.sequences_in_flight, seconds)
        self.step_totals = self.step_totals.with_step(batch, seconds)
        for piece in batch.slices:
            key = self.scheduler.sequences_in_flight[piece.sequence_id].key
            if key not in self.admitted:
                share = seconds * self.scheduler.prefill_budget.compute_time_share(
                    batch, len(piece.token_ids)
                )
                self.prefill_seconds[key] = self.prefill_seconds.get(key, 0.0) + share
        self.scheduler.prefill_budget.observe_step(batch, seconds)


class VirtualCluster:
    def __init__(
        self,
        *,
        nodes: int = 1,
        prefill: int = 0,
        mode: Literal["disaggregated", "colocated", "auto"] = "colocated",
        prefill_share: float = 0.5,
        link: float = 0.002,
        tenants: TenantTable | None = None,
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
        self.requests: dict[RequestId, VirtualRequest] = {}
        self.refused_requests: list[VirtualRequest] = []
        self.peak_queue_length = 0
        self.last_token_at = 0.0
        self.longest_token_gap_seconds = 0.0
        self.slowdown_by_node: dict[
            str, float
        ] = {}  # of nodes by name: so many times as slow as the others
        self.placements: list[
            tuple[float, str]
        ] = []  # to which node an attempt was given, and when
        self.on_request_end: Callable[[VirtualRequest], None] = lambda _: None
        self._costs = costs or PacedCosts()
        self._handoff_seconds = link
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._serial = count()
        self.brain = Brain(
            NodeRegistry(1e6, 1e6),
            PrefixAwarePolicy(),
            BrainSettings(
                mode=mode,
                max_queue=max_queue,
                max_attempts=8,
                reserve_timeout=15.0,
                local_prefill_share=prefill_share,
            ),
        )
        if tenants is not None:
            self.brain.reload_tenants(tenants, 0.0)
        self.tenants = tenants or TenantTable()
        self._nodes: dict[Incarnation, _VirtualNode] = {}
        limits = SchedulerLimits(max_num_seqs, max_batched_tokens, 1 << 16)
        for number in range(nodes + prefill):
            pool = BlockPool(blocks, PACED_LAYOUT.block_size, lambda: self.now)
            role = Role.DECODE if number < nodes else Role.PREFILL
            node = _VirtualNode(
                Incarnation(f"{role.value[0]}{number}"), pool, Scheduler(pool, limits), role
            )
            self._nodes[node.incarnation] = node
            info = make_join_info(
                node.incarnation,
                role,
                layout=PACED_LAYOUT,
                num_blocks=blocks,
                max_num_seqs=limits.max_num_seqs,
                max_batched_tokens=limits.max_batched_tokens,
                max_model_len=limits.max_model_len,
            )
            self._apply_effects(self.brain.join_node(info, node.incarnation, 0.0))
            self._send_heartbeat(node)

    # what a test does

    def call_at(self, when: float, call: Callable[[], object]) -> None:
        heapq.heappush(self._events, (when, next(self._serial), call))

    def submit_request(
        self,
        tenant: str = "default",
        prompt: int = 64,
        output: int = 8,
        timeout: float = 600.0,
        priority: int = 0,
    ) -> VirtualRequest:
        """A request arrives now."""
        served = VirtualRequest(tenant, self.now, prompt)
        known = self.tenants.get_tenant(tenant)
        number = next(self._serial)
        request = Request(
            id=RequestId(f"r{number}"),
            prompt_token_ids=tuple(self.random.choices(range(1, 1000), k=prompt)),
            sampling=SamplingParams(output),
            timeout_seconds=timeout,
            cache_salt=known.cache_salt,
            principal=self.tenants.make_principal(known, priority),
        )
        self.requests[request.id] = served
        try:
            effects = self.brain.submit_request(request, self.now)
        except RequestRejected as error:
            del self.requests[request.id]
            served.error, served.ended_at = error, self.now
            self.refused_requests.append(served)
            self.on_request_end(served)
            return served
        self.peak_queue_length = max(self.peak_queue_length, self.brain.queued_requests)
        self._apply_effects(effects)
        return served

    def schedule_poisson_load(
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
            self.call_at(when, partial(self.submit_request, tenant, prompt, tokens, timeout))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, call = heapq.heappop(self._events)
            call()
            due = self.brain.next_tick_at()
            if due is not None and due <= self.now:
                self._apply_effects(self.brain.tick(self.now))
        self.now = until

    def completed_requests(
        self, tenant: str | None = None, since: float = 0.0
    ) -> list[VirtualRequest]:
        everyone = [each for each in self.requests.values() if tenant in (None, each.tenant)]
        return [each for each in everyone if each.is_done and each.arrived_at >= since]

    def total_device_seconds(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for node in self._nodes.values():
            for name, seconds in node.device_time.counters().items():
                total[name] = total.get(name, 0.0) + seconds
        return total

    # the coordinator's shell

    def _apply_effects(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendOrder(node, message):
                    self._on_order(self._nodes[node], message)
                case EmitTokens(request, tokens, _):
                    served = self.requests[request]
                    served.first_token_at = (
                        self.now if served.first_token_at is None else served.first_token_at
                    )
                    served.token_count += len(tokens)
                    self.longest_token_gap_seconds = max(
                        self.longest_token_gap_seconds, self.now - self.last_token_at
                    )
                    self.last_token_at = self.now
                case EndRequest():
                    served = self.requests[effect.request_id]
                    served.ended_at = self.now
                    served.error = effect.result if isinstance(effect.result, BatonError) else None
                    self.on_request_end(served)
                case _:
                    pass

    def _send_to_brain(self, node: _VirtualNode, message: NodeReport) -> None:
        self._apply_effects(self.brain.receive_report(node.incarnation, message, self.now))

    # a node

    def _on_order(self, node: _VirtualNode, message: NodeOrder) -> None:
        if isinstance(message, PrefillOrder | DecodeOrder):
            self.placements.append((self.now, node.incarnation))
        if isinstance(message, CancelOrder):
            node.scheduler.cancel_sequence(message.key)
        elif isinstance(message, PrefillOrder):
            node.scheduler.add_sequence(
                message.work, _root_hash(message.work), is_prefill_only=True
            )
            self._wake(node)
        elif isinstance(message, DecodeOrder) and message.kv_writer is not None:
            self._reserve(node, message.work, message.kv_writer.incarnation)
        elif isinstance(message, TicketOrder):
            node.scheduler.mark_ticketed(message.ticket.key)
        elif isinstance(message, DecodeOrder):
            node.scheduler.prefill_budget.prefill_step_share = message.prefill_step_share or None
            root = _root_hash(message.work)
            survey = node.scheduler.estimate_admission(message.work, root)
            if survey.refusal is None:
                node.scheduler.add_sequence(message.work, root)
                self._wake(node)
            else:
                refused = ReservationRefused(
                    message.work.key, survey.refusal.needed_blocks, survey.refusal.free_blocks
                )
                self.call_at(self.now, lambda: self._send_to_brain(node, refused))

    def _reserve(self, node: _VirtualNode, work: AttemptSpec, writer: Incarnation) -> None:
        ticket = make_ticket(node.incarnation, work.key, writer)
        found = node.scheduler.reserve_for_handoff(work, _root_hash(work), ticket.id)
        answer: NodeReport = BlocksReserved(work.key, ticket, 0)
        if isinstance(found, CapacityRefusal):
            answer = ReservationRefused(work.key, found.needed_blocks, found.free_blocks)
        self.call_at(self.now, lambda: self._send_to_brain(node, answer))

    def _wake(self, node: _VirtualNode) -> None:
        if not node.is_stepping:
            node.is_stepping = True
            self.call_at(self.now, lambda: self._step(node))

    def _step(self, node: _VirtualNode) -> None:
        plan = node.scheduler.schedule_step()
        batch = plan.batch
        if batch is None:
            node.is_stepping = False
        else:
            seconds = self._costs.compute_step_seconds(batch) * self.slowdown_by_node.get(
                node.incarnation, 1.0
            )

            def ended() -> None:
                node.record_step(batch, seconds)
                computed = [SliceResult(7 if piece.sample_spec else None) for piece in batch.slices]
                self._send_outcomes(node, node.scheduler.update_from_results(batch, computed))
                self._step(node)

            self.call_at(self.now + seconds, ended)
        self._send_outcomes(node, plan.outcomes)

    def _send_outcomes(
        self, node: _VirtualNode, outcomes: "list[SequenceOutcome] | tuple[SequenceOutcome, ...]"
    ) -> None:
        events: list[TokenEvent] = []
        for outcome in outcomes:
            match outcome:
                case TokenEmitted(sequence, event):
                    if sequence.key not in node.admitted:
                        node.admitted.add(sequence.key)
                        cached, share = (
                            sequence.num_cached_tokens,
                            node.prefill_seconds.pop(sequence.key),
                        )
                        self._send_to_brain(
                            node,
                            DecodeStarted(
                                sequence.key, sequence.context_len - cached, cached, 0, share
                            ),
                        )
                    events.append(event)
                case SequenceFailed(sequence, error, caused_by):
                    node.prefill_seconds.pop(sequence.key, None)
                    self._send_to_brain(node, AttemptFailed(sequence.key, error, caused_by))
                case PrefillCompleted(sequence, event):
                    cached, share = (
                        sequence.num_cached_tokens,
                        node.prefill_seconds.pop(sequence.key),
                    )
                    self._send_to_brain(
                        node,
                        PrefillEnded(sequence.key, sequence.context_len - cached, cached, share),
                    )
                    self.call_at(
                        self.now + self._handoff_seconds,
                        partial(self._finish_handoff, node, sequence.key, event),
                    )
                case _:
                    raise AssertionError(outcome)
        if events:
            self._send_to_brain(node, StepTokens(tuple(events)))

    def _finish_handoff(self, writer: _VirtualNode, key: AttemptKey, event: TokenEvent) -> None:
        ticket = make_ticket(Incarnation(""), key, writer.incarnation).id
        decode = next(
            node
            for node in self._nodes.values()
            if node is not writer and node.scheduler.sequences.get(key)
        )
        decode.pool.reservations.mark_writing(ticket)
        decode.admitted.add(key)
        outcomes = decode.scheduler.commit_handoff(key, (event.token_id,))
        writer.scheduler.finish_handoff(key)
        sequence = next(
            outcome.sequence for outcome in outcomes if isinstance(outcome, TokenEmitted)
        )
        self._send_to_brain(decode, DecodeStarted(key, 0, 0, sequence.context_len))
        size = sequence.context_len * PACED_LAYOUT.token_bytes
        report = HandoffReport(transport="shm", bytes=size, exposed_seconds=self._handoff_seconds)
        self._send_to_brain(writer, HandoffCompleted(key, report))
        self._send_outcomes(decode, outcomes)
        self._wake(decode)

    def _send_heartbeat(self, node: _VirtualNode) -> None:
        counts = {
            f"blocks_{state.value}": number
            for state, number in node.pool.ownership.count_blocks_by_state().items()
        }
        stats = NodeStats(
            blocks_total=node.pool.num_blocks,
            decode_steps=node.step_totals.num_steps,
            decode_step_seconds=node.step_totals.seconds,
            decode_step_sequences=node.step_totals.num_sequences,
            decode_step_tokens=node.step_totals.context_tokens,
            **counts,
        )
        self._send_to_brain(node, Heartbeat(stats))
        self.call_at(self.now + HEARTBEAT, lambda: self._send_heartbeat(node))


def _root_hash(work: AttemptSpec) -> BlockHash:
    return BlockHash(work.request.cache_salt.ljust(32, b"\0"))


def percentile(values: list[float], share: float) -> float:
    """The smallest of `values` that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
