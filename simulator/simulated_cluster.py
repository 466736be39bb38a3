"""The real brain on a virtual clock: the shell that carries out its effects on simulated nodes."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from baton.cluster_link.messages import (
    DecodeOrder,
    Heartbeat,
    JoinInfo,
    NodeOrder,
    NodeReport,
    PrefillOrder,
)
from baton.cluster_link.report_types import NodeStats
from baton.errors import BatonError, RequestRejected
from baton.types import Incarnation, Request, RequestId
from coordinator.core.brain import Brain
from coordinator.core.common.effects import Effect, EmitTokens, EndRequest, SendOrder
from coordinator.core.common.settings import BrainSettings
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.placement.policies import PrefixAwarePolicy
from simulator.simulated_request import SimulatedRequest
from simulator.virtual_clock import VirtualClock

_NO_TIMEOUT = 1e6  # seconds; simulated nodes are never silent


class SimulatedNode(Protocol):
    """A node that computes nothing: everything takes what a cost model says."""

    @property
    def incarnation(self) -> Incarnation: ...

    def execute_order(self, order: NodeOrder) -> None:
        """Start what the coordinator orders; reports follow at their time."""

    def collect_stats(self) -> NodeStats:
        """Return the statistics of the next heartbeat."""


class SimulatedCluster:
    """Nodes join it, requests are submitted to it, and `run` lets time pass."""

    def __init__(self, settings: BrainSettings, heartbeat_seconds: float) -> None:
        self.brain = Brain(NodeRegistry(_NO_TIMEOUT, _NO_TIMEOUT), PrefixAwarePolicy(), settings)
        self.accepted_requests: list[SimulatedRequest] = []
        self.rejected_requests: list[SimulatedRequest] = []
        self.peak_queue_length = 0
        self.last_token_at = 0.0
        self.longest_token_gap_seconds = 0.0  # in which no client received a token
        # To which node an attempt was given, and when.
        self.placements: list[tuple[float, Incarnation]] = []
        self.on_request_end: Callable[[SimulatedRequest], object] = lambda _: None
        self._clock = VirtualClock(self._tick_if_due)
        self._heartbeat_seconds = heartbeat_seconds
        self.nodes: dict[Incarnation, SimulatedNode] = {}
        self._open_requests: dict[RequestId, SimulatedRequest] = {}

    # time

    @property
    def now(self) -> float:
        return self._clock.now

    def call_at(self, when: float, call: Callable[[], object]) -> None:
        self._clock.call_at(when, call)

    def run(self, until: float) -> None:
        self._clock.run_events(until)
        self._clock.now = until

    # requests

    def submit_request(self, request: Request) -> SimulatedRequest:
        """A request arrives now."""
        seen = SimulatedRequest(request.principal.tenant, self.now, len(request.prompt_token_ids))
        try:
            effects = self.brain.submit_request(request, self.now)
        except RequestRejected as error:
            seen.error, seen.ended_at = error, self.now
            self.rejected_requests.append(seen)
            self.on_request_end(seen)
            return seen
        self.accepted_requests.append(seen)
        self._open_requests[request.id] = seen
        self.peak_queue_length = max(self.peak_queue_length, self.brain.queued_requests)
        self.apply_effects(effects)
        return seen

    @property
    def submitted_requests(self) -> list[SimulatedRequest]:
        """All requests, those that were rejected last."""
        return self.accepted_requests + self.rejected_requests

    def completed_requests(
        self, tenant: str | None = None, since: float = 0.0
    ) -> list[SimulatedRequest]:
        """Return the requests that were served, of those that arrived from `since` on."""
        return [
            seen
            for seen in self.accepted_requests
            if seen.is_done and seen.arrived_at >= since and tenant in (None, seen.tenant)
        ]

    # nodes

    def join_node(self, node: SimulatedNode, info: JoinInfo) -> None:
        self.nodes[node.incarnation] = node
        self.apply_effects(self.brain.join_node(info, node.incarnation, self.now))
        self._send_heartbeat(node)

    def remove_node(self, node: SimulatedNode, error: BatonError) -> None:
        del self.nodes[node.incarnation]
        self.apply_effects(self.brain.remove_member(node.incarnation, error, self.now))

    def send_report(self, sender: Incarnation, report: NodeReport) -> None:
        """The coordinator receives a node's report now; nothing happens if the node has left."""
        if sender in self.nodes:
            self.apply_effects(self.brain.receive_report(sender, report, self.now))

    def _send_heartbeat(self, node: SimulatedNode) -> None:
        if node.incarnation in self.nodes:
            self.send_report(node.incarnation, Heartbeat(node.collect_stats()))
            self.call_at(self.now + self._heartbeat_seconds, partial(self._send_heartbeat, node))

    # the coordinator's shell

    def apply_effects(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, EmitTokens):
                self._record_tokens(effect.request_id, len(effect.token_ids))
            elif isinstance(effect, SendOrder):
                self._deliver_order(effect.incarnation, effect.order)
            elif isinstance(effect, EndRequest):
                self._record_end(effect)

    def _deliver_order(self, incarnation: Incarnation, order: NodeOrder) -> None:
        if isinstance(order, PrefillOrder | DecodeOrder):
            self.placements.append((self.now, incarnation))
        node = self.nodes.get(incarnation)
        if node is not None:
            node.execute_order(order)

    def _record_tokens(self, request_id: RequestId, count: int) -> None:
        now = self._clock.now
        seen = self._open_requests.get(request_id)
        if seen is None:
            return  # a probe: no client waits for it
        if seen.first_token_at is None:
            seen.first_token_at = now
        seen.token_count += count
        gap = now - self.last_token_at
        self.longest_token_gap_seconds = max(self.longest_token_gap_seconds, gap)
        self.last_token_at = now

    def _record_end(self, end: EndRequest) -> None:
        seen = self._open_requests.pop(end.request_id, None)
        if seen is not None:
            seen.ended_at = self.now
            seen.error = end.result if isinstance(end.result, BatonError) else None
            self.on_request_end(seen)

    def _tick_if_due(self) -> None:
        due = self.brain.next_tick_at()
        if due is not None and due <= self.now:
            self.apply_effects(self.brain.tick(self.now))
