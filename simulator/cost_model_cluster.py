"""The real brain with nodes that know only costs: a prompt, a step and a hand-off take what
`SimulatedCosts` says, and a node changes its role when it is ordered to."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Protocol

from baton.cluster_link.messages import (
    BlocksReserved,
    CancelOrder,
    DecodeOrder,
    DecodeStarted,
    HandoffCompleted,
    NodeOrder,
    NodeReport,
    PrefillEnded,
    PrefillOrder,
    SetRoleOrder,
    StepTokens,
    TicketOrder,
)
from baton.cluster_link.report_types import NodeStats
from baton.errors import NodeLost
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
from coordinator.core.common.settings import BrainSettings
from simulator.decode_batch import SIMULATED_TOKEN, DecodeBatch
from simulator.node_messages import make_handoff_report, make_join_info, make_ticket
from simulator.simulated_cluster import SimulatedCluster

_HEARTBEAT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class SimulatedCosts:
    """All in seconds."""

    prompt_token_seconds: float = 0.002
    step_seconds: float = 0.04  # of each decode step
    sequence_seconds: float = 0.002  # more for each sequence of a decode step
    resident_token_seconds: float = 0.0  # more for each context token of a decode step
    handoff_seconds: float = 0.01
    role_switch_seconds: float = 0.2  # from the order to the join in the new role


class PlannedArrival(Protocol):
    """A planned request: when it arrives and how long it is."""

    @property
    def start_seconds(self) -> float: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...


class CostModelCluster(SimulatedCluster):
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
        """`slots` and `blocks` are those of each node."""
        settings = BrainSettings(
            mode="disaggregated", max_queue=max_queue, max_attempts=8, reserve_timeout=1e6
        )
        super().__init__(settings, _HEARTBEAT_SECONDS)
        self.costs = costs or SimulatedCosts()
        self.blocks_per_node = blocks
        self._slots = slots
        self._random = random.Random(seed)
        self._joins = count()
        self._requests = count()
        for number in range(prefill + decode):
            role = Role.PREFILL if number < prefill else Role.DECODE
            self._join_in_role(NodeName(f"n{number}"), role)

    def schedule_requests(self, plan: Iterable[PlannedArrival]) -> None:
        """Submit each request at its time."""
        for shape in plan:
            self.call_at(shape.start_seconds, partial(self._submit_planned, shape))

    def slo_attainment(self, slo: Slo, begin: float = 0.0, end: float = float("inf")) -> float:
        """Return the share of the requests that arrived in that time which were served within the
        objective."""
        seen = [one for one in self.submitted_requests if begin <= one.arrived_at < end]
        return sum(one.meets_slo(slo) for one in seen) / len(seen)

    def switch_role(self, node: "_CostModelNode", role: Role) -> None:
        """The node leaves and joins anew in the other role."""
        self.remove_node(node, NodeLost("it takes another role"))
        self._join_in_role(node.name, role)

    def find_node(self, incarnation: Incarnation | None) -> "_CostModelNode | None":
        node = self.nodes.get(incarnation) if incarnation is not None else None
        assert node is None or isinstance(node, _CostModelNode)
        return node

    def _submit_planned(self, shape: PlannedArrival) -> None:
        request = Request(
            id=RequestId(f"r{next(self._requests)}"),
            prompt_token_ids=(self._random.getrandbits(30), *range(1, shape.prompt_tokens)),
            sampling=SamplingParams(shape.output_tokens, ignore_eos=True),
            timeout_seconds=600.0,
        )
        self.submit_request(request)

    def _join_in_role(self, name: NodeName, role: Role) -> None:
        info = make_join_info(
            name,
            role,
            num_blocks=self.blocks_per_node,
            max_num_seqs=self._slots,
            max_batched_tokens=512,
            max_model_len=1 << 16,
            vocab_size=1 << 30,
        )
        incarnation = Incarnation(f"{name}#{next(self._joins)}")
        self.join_node(_CostModelNode(self, name, incarnation), info)


class _CostModelNode:
    """Computes one prompt after another, or decodes all its sequences in every step."""

    def __init__(self, cluster: CostModelCluster, name: NodeName, incarnation: Incarnation) -> None:
        self.name = name
        self.incarnation = incarnation
        self._cluster = cluster
        # Prompts that wait or are computed (the first), and whether no decode node is needed.
        self._prompts: dict[AttemptKey, tuple[AttemptSpec, bool]] = {}
        self._decode_nodes: dict[AttemptKey, Incarnation] = {}  # by the tickets
        self._batch = DecodeBatch()
        self._is_busy = False
        self._stats = NodeStats()

    def collect_stats(self) -> NodeStats:
        blocks = self._cluster.blocks_per_node
        return replace(self._stats, blocks_total=blocks, blocks_free=blocks)

    def execute_order(self, order: NodeOrder) -> None:
        cluster = self._cluster
        match order:
            case DecodeOrder(work, writer) if writer is not None:
                self._batch.reserve_sequence(work)
                ticket = make_ticket(self.incarnation, work.key, writer.incarnation)
                self._report_at(cluster.now, BlocksReserved(work.key, ticket, 0))
            case TicketOrder(ticket):
                self._decode_nodes[ticket.key] = ticket.decode_peer.incarnation
            case PrefillOrder(work, alone):
                self._prompts[work.key] = (work, alone)
                self._start_prefill()
            case CancelOrder(key, _):
                if next(iter(self._prompts), None) != key:  # the first is computed to its end
                    self._prompts.pop(key, None)
                self._batch.cancel_sequence(key)
            case SetRoleOrder(role):
                ready_at = cluster.now + cluster.costs.role_switch_seconds
                cluster.call_at(ready_at, partial(cluster.switch_role, self, role))
            case _:
                pass

    def _report(self, report: NodeReport) -> None:
        self._cluster.send_report(self.incarnation, report)

    def _report_at(self, when: float, report: NodeReport) -> None:
        self._cluster.call_at(when, partial(self._report, report))

    # prefill

    def _start_prefill(self) -> None:
        if self._is_busy or not self._prompts:
            return
        self._is_busy = True
        work, alone = next(iter(self._prompts.values()))
        tokens = len(work.context_token_ids)
        seconds = self._cluster.costs.prompt_token_seconds * tokens
        self._cluster.call_at(
            self._cluster.now + seconds, partial(self._finish_prefill, work, alone, seconds)
        )

    def _finish_prefill(self, work: AttemptSpec, alone: bool, seconds: float) -> None:
        self._is_busy = False
        key = work.key
        self._prompts.pop(key, None)
        self._report(PrefillEnded(key, len(work.context_token_ids), 0, seconds))
        if alone:
            index = len(work.emitted_token_ids)
            event = TokenEvent(key, index, SIMULATED_TOKEN, FinishReason.LENGTH)
            self._report(StepTokens((event,)))
        else:
            landed_at = self._cluster.now + self._cluster.costs.handoff_seconds
            self._cluster.call_at(landed_at, partial(self._finish_handoff, key))
        self._start_prefill()

    def _finish_handoff(self, key: AttemptKey) -> None:
        decode = self._cluster.find_node(self._decode_nodes.pop(key, None))
        received = decode.begin_decode(key) if decode is not None else None
        if decode is None or received is None:
            return
        report = make_handoff_report(received, self._cluster.costs.handoff_seconds)
        self._report(HandoffCompleted(key, report))
        decode.start_step()

    # decode

    def begin_decode(self, key: AttemptKey) -> int | None:
        """Start the sequence whose hand-off has landed, and return the tokens that it brought.

        None if the sequence has been cancelled.
        """
        work = self._batch.start_reserved(key)
        if work is None:
            return None
        received = len(work.context_token_ids)
        self._report(DecodeStarted(key, 0, 0, received))
        self._emit_tokens([key])
        return received

    def start_step(self) -> None:
        """Begin a decode step, unless one is under way or there is nothing to decode."""
        running = self._batch.running
        if self._is_busy or not running:
            return
        self._is_busy = True
        batch = list(running)
        resident = sum(sequence.context_len for sequence in running.values())
        costs = self._cluster.costs
        seconds = (
            costs.step_seconds
            + costs.sequence_seconds * len(batch)
            + costs.resident_token_seconds * resident
        )
        stats = self._stats
        self._stats = replace(
            stats,
            decode_steps=stats.decode_steps + 1,
            decode_step_seconds=stats.decode_step_seconds + seconds,
            decode_step_sequences=stats.decode_step_sequences + len(batch),
            decode_step_tokens=stats.decode_step_tokens + resident,
        )
        self._cluster.call_at(self._cluster.now + seconds, partial(self._finish_step, batch))

    def _finish_step(self, batch: list[AttemptKey]) -> None:
        self._is_busy = False
        self._emit_tokens(batch)
        self.start_step()

    def _emit_tokens(self, keys: list[AttemptKey]) -> None:
        events = self._batch.emit_tokens(keys)
        if events:
            self._report(StepTokens(events))
