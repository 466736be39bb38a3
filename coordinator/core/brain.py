"""The coordinator's pure core behind one class: inputs with their time in, effects in order out.

Its shell is `coordinator/node_links/dispatcher.py`; simulators are others.
"""

import math
from collections.abc import Sequence

from baton.cluster_link.messages import (
    Heartbeat,
    JoinInfo,
    NodeReport,
    PeerLostNotice,
    PoolJoinInfo,
)
from baton.errors import BatonError, NodeDrained, NodeLost, NotFound, RequestRejected
from baton.limits import ModelBounds
from baton.pb.cluster_pb2 import ExplainResponse
from baton.pb.common_pb2 import Timeline
from baton.role_split import RoleSplit
from baton.slo import Slo
from baton.types import FinishReason, Incarnation, NodeName, Principal, Request, RequestId
from coordinator.core.admission.admission_controller import AdmissionRequest
from coordinator.core.admission.degradation import DegradationController
from coordinator.core.admission.tenants import TenantTable
from coordinator.core.common.counters import Counters
from coordinator.core.common.effects import DegradationChanged, Effect, MemberLost, RatioChanged
from coordinator.core.common.settings import BrainSettings
from coordinator.core.membership.node_registry import (
    NodeMember,
    NodeRegistry,
    NodeServiceState,
    is_node_empty,
)
from coordinator.core.membership.pool_membership import PoolMembership
from coordinator.core.membership.prefix_directory import PoolMember
from coordinator.core.placement.breakers import CircuitBreakers
from coordinator.core.placement.interface import PlacementPolicy
from coordinator.core.placement.placement_state import PlacementState
from coordinator.core.ratio.controller import RatioController
from coordinator.core.ratio.role_switcher import RoleSwitcher
from coordinator.core.requests.explain import MAX_AGE_SECONDS, build_explanation
from coordinator.core.requests.model_change import count_bound_requests, end_requests_of_model
from coordinator.core.requests.node_reports import NodeReportHandler
from coordinator.core.requests.placement_loop import PlacementLoop
from coordinator.core.requests.pressure import PressureMonitor
from coordinator.core.requests.record import RequestState
from coordinator.core.requests.request_admitter import RequestAdmitter
from coordinator.core.requests.retries import RetryScheduler
from coordinator.core.requests.table import RequestTable


class Brain:
    """Every input returns the effects that its caller must carry out, in order."""

    def __init__(
        self, registry: NodeRegistry, placement: PlacementPolicy, settings: BrainSettings
    ) -> None:
        self.node_registry = registry
        self._table = RequestTable(registry, placement, settings)
        self._placement_loop = PlacementLoop(registry, self._table, settings.reserve_timeout)
        self._request_admitter = RequestAdmitter(self._table, settings)
        self._report_handler = NodeReportHandler(registry, self._table)
        self.role_switcher = RoleSwitcher(registry, self._table, settings.mode, self._drop_node)
        self.ratio_controller = RatioController(
            registry, self._table, self.role_switcher, settings.default_slo
        )
        self._pressure_monitor = PressureMonitor(self._table, settings)
        self._pool_membership = PoolMembership(
            registry,
            self.placement_state.pools,
            self.placement_state.prefix_directory,
            self.counters,
            self._table.effects.append_effect,
        )

    # inputs

    def submit_request(
        self, request: Request, now: float, *, internal: bool = False
    ) -> list[Effect]:
        """Submit a request. `AdmitRequest` follows at once, or when nodes that can serve it have
        joined; otherwise it ends with Unavailable after `ADMIT_TIMEOUT_SECONDS`. Raises
        ShuttingDown, Overloaded, ServiceUnavailable or ContextLengthExceeded, which are counted."""
        return self.submit_requests([request], now, internal=internal)

    def submit_requests(
        self, requests: Sequence[Request], now: float, *, internal: bool = False
    ) -> list[Effect]:
        """Submit all requests, in this order, or none: raises the errors of `submit_request`, each
        counted once, and InvalidRequest if the queue could never hold so many."""
        self._request_admitter.admit_requests(requests, now, internal=internal)
        return self._take_effects(now)

    def count_rejection(self, error: RequestRejected, tenant_class: str, now: float) -> None:
        """Count a request that was rejected before it was submitted."""
        self._request_admitter.count_rejection(error, tenant_class, now)

    def require_admission(
        self, standing: Principal, count: int, timeout: float, now: float
    ) -> None:
        """Check whether `count` requests would be admitted, before their prompts are tokenized.
        Raises ShuttingDown, Overloaded or InvalidRequest; not counted."""
        self._request_admitter.check_admission(standing, AdmissionRequest(count, timeout), now)

    def reload_tenants(self, tenants: TenantTable, now: float) -> list[Effect]:
        """Replace the tenants. Running requests keep their principals."""
        self._table.admission.reload_tenants(tenants, now)
        self._table.wake_placement()
        return self._take_effects(now)

    def join_node(self, info: JoinInfo, incarnation: Incarnation, now: float) -> list[Effect]:
        """A node joins as `incarnation` and replaces an older one of its process. Raises
        ConfigError, counted: see `NodeRegistry.check_join`. The first node of another model ends
        the requests that were admitted under the former one."""
        try:
            replaced = self.node_registry.check_join(
                info, now, count_bound_requests(self._table.records.values())
            )
        except BatonError:
            self.counters.joins["refused"] += 1
            raise
        if replaced is not None:
            self._drop_node(replaced, NodeLost(f"node {info.name} has joined anew"), now)
        former = self.node_registry.model_digest
        node = self.node_registry.add_node(info, incarnation, now)
        if former != node.model_digest:
            end_requests_of_model(self._table, former, now)
        self._table.context_capacity.on_node_joined(info)
        self._table.placement_state.add_node(node)
        self._table.loads.add_node(incarnation)
        self.role_switcher.on_node_joined(node, now)
        self._table.wake_placement()
        self.counters.joins["joined"] += 1
        return self._take_effects(now)

    def join_pool(self, info: PoolJoinInfo, incarnation: Incarnation, now: float) -> list[Effect]:
        """A host's pool joins, replacing an older one of its name. Raises ConfigError, counted."""
        self._pool_membership.join_pool(info, incarnation, now)
        return self._take_effects(now)

    def receive_report(self, sender: Incarnation, message: NodeReport, now: float) -> list[Effect]:
        """Apply a report of a node or pool; it is dropped if `sender` is no member."""
        if self._pool_membership.receive_report(sender, message, now):
            return self._take_effects(now)
        node = self.node_registry.nodes.get(sender)
        if node is None:
            self.counters.dropped_messages["stale"] += 1
            return []
        node.heard_at = now
        self._report_handler.handle_message(sender, message, now)
        if isinstance(message, Heartbeat):
            self.role_switcher.on_heartbeat()
        return self._take_effects(now)

    def remove_member(
        self, incarnation: Incarnation, error: BatonError, now: float
    ) -> list[Effect]:
        """Remove a node or a pool, whose stream ended. Idempotent."""
        self._pool_membership.remove_pool(incarnation, error)
        node = self.node_registry.nodes.get(incarnation)
        if node is not None:
            self._drop_node(node, error, now)
        return self._take_effects(now)

    def cancel_request(self, request: RequestId, error: BatonError, now: float) -> list[Effect]:
        """End a request with `error`, in any state; does nothing after its end."""
        record = self._table.records.get(request)
        if record is not None:
            self._table.end_request(record, error, now)
        return self._take_effects(now)

    def stop_request(self, request: RequestId, now: float) -> list[Effect]:
        """End a request successfully: its client needs no more. Does nothing after its end."""
        record = self._table.records.get(request)
        if record is not None:
            self._table.end_request(record, FinishReason.STOP, now)
        return self._take_effects(now)

    def start_draining(self) -> None:
        """Reject new requests from now on; requests that are here continue."""
        self._request_admitter.is_draining = True

    def drain_node(self, name: NodeName, timeout: float | None, now: float) -> list[Effect]:
        """Give the node no new work, and replace what it still has after `timeout` seconds (None:
        never). Raises NotFound."""
        self.get_node(name)
        self.node_registry.drains.start_drain(name, None if timeout is None else now + timeout)
        self._table.wake_placement()
        self.role_switcher.on_service_changed()
        return self.tick(now)

    def undrain_node(self, name: NodeName, now: float) -> list[Effect]:
        """Put a node back in service, if it is not. Raises NotFound for an unknown name."""
        if not self.node_registry.drains.end_drain(name):
            self.get_node(name)
        self._table.wake_placement()
        self.role_switcher.on_service_changed()
        return self._take_effects(now)

    def set_ratio(self, target: RoleSplit, patience: float, now: float) -> list[Effect]:
        """Switch the roles of nodes until they have this ratio, and keep it. What a node still does
        `patience` seconds after it was chosen is placed again. Ends `set_auto_ratio`. Raises
        InvalidRequest, naming the possible splits."""
        self.role_switcher.set_target(target, patience, now)
        self.ratio_controller.disable_auto()
        return self._take_effects(now)

    def set_auto_ratio(self, slo: Slo | None, patience: float, now: float) -> list[Effect]:
        """Change the ratio to keep an SLO, None for the default one, until `set_manual_ratio` or
        `set_ratio`."""
        self.ratio_controller.enable_auto(slo, patience, now)
        return self._take_effects(now)

    def set_manual_ratio(self) -> None:
        """Stop changing the ratio. Idempotent. Pending role switches continue."""
        self.ratio_controller.disable_auto()

    def tick(self, now: float) -> list[Effect]:
        """Handle what time alone has made due: silent and stalled nodes, deadlines, drains and role
        switches; and sweep a slice of the prefix directory."""
        self.placement_state.prefix_directory.sweep_slice()
        for node, error in self.node_registry.find_expired(now, self.count_attempts):
            self._drop_node(node, error, now)
        self._table.context_capacity.expire_departed_nodes(now)
        self._pool_membership.remove_silent_pools(now)
        for name in self.node_registry.drains.pop_due(now):
            drained = self.node_registry.by_name(name)
            if drained is not None:
                self._table.evacuate_node(
                    drained.incarnation, NodeDrained(f"node {name} is being drained"), now
                )
        for pair in self._table.breakers.half_open_due_pairs(now):
            self._table.on_breaker_changed(pair)
        self.role_switcher.run_due(now)
        steered = self.ratio_controller.adjust_if_due(now)
        if steered is not None:
            self._table.effects.append_effect(RatioChanged(steered, self.ratio_controller.reason))
        for request in self._table.timers.pop_due(now):
            self._table.on_request_timer(request, now)
        return self._take_effects(now)

    def next_tick_at(self) -> float | None:
        """Return when `tick` must be called next if no other input comes."""
        members = (
            self.node_registry.next_silence_at(),
            self.node_registry.drains.next_deadline(),
            self.placement_state.pools.next_silence_at(),
        )
        tidying = (
            -math.inf if self.placement_state.prefix_directory.needs_sweep else None
        )  # as soon as others have had their turn
        times = (
            *members,
            self.role_switcher.next_due_at(),
            self.ratio_controller.next_evaluation_at(),
            tidying,
            *self._table.next_due_times(),
        )
        return min((time for time in times if time is not None), default=None)

    # views

    @property
    def counters(self) -> Counters:
        return self._table.counters

    @property
    def placement_state(self) -> PlacementState:
        return self._table.placement_state

    @property
    def tenant_classes(self) -> tuple[str, ...]:
        """The classes of the tenants file, or the one class of all clients."""
        return self._table.admission.tenants.classes

    def list_members(self) -> list[NodeMember | PoolMember]:
        """Return all nodes and pools."""
        return [*self.node_registry.nodes.values(), *self.placement_state.pools.members.values()]

    @property
    def is_draining(self) -> bool:
        return self._request_admitter.is_draining

    @property
    def queued_requests(self) -> int:
        """Number of requests that wait to be placed."""
        return len(self._table.queue) + len(self._table.oversized) + len(self._table.retries)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of the requests in the queue."""
        return self._table.queue.backlog.total_prompt_tokens

    @property
    def running_requests(self) -> int:
        """Number of requests that are placed and have not ended."""
        return len(self._table.records) - self.queued_requests

    def seconds_without_progress(self, now: float) -> float:
        """Return for how long there have been requests and none of them made progress."""
        return now - self._table.last_progress_at if self._table.records else 0.0

    @property
    def breakers(self) -> CircuitBreakers:
        return self._table.breakers

    @property
    def retries(self) -> RetryScheduler:
        return self._table.retries

    def list_active_requests(self) -> list[RequestId]:
        return list(self._table.records)

    def get_request_state(self, request: RequestId) -> RequestState | None:
        """Return the state of a request, None after its end."""
        return record.state if (record := self._table.records.get(request)) else None

    def get_timeline(self, request: RequestId) -> Timeline | None:
        """Return the timeline of a request that ended recently."""
        return self._table.ended_requests.timelines.get(request)

    def explain_request(self, request: RequestId, now: float) -> ExplainResponse:
        """Explain a running or recently ended request, with its siblings if it is the first choice.
        Raises NotFound."""
        told = self._find_explanation(request, now)
        if told is None:
            most = self._table.ended_requests.explanations.max_kept
            raise NotFound(
                f"there is no request {request[:64]!r}: the last {most} that have ended are "
                f"kept (--explain-keep), for {MAX_AGE_SECONDS / 3600:g} h at most"
            )
        for other in told.others:
            known = self._find_explanation(RequestId(other.request_id), now)
            if known is not None:
                for attempt in known.attempts:
                    attempt.ClearField("considered")
                other.CopyFrom(known)
        return told

    def count_attempts(self, node: Incarnation) -> int:
        """Count the attempts that have a leg on the node."""
        return len(self._table.loads.attempts_on(node))

    def get_node(self, name: NodeName) -> NodeMember:
        """Raises NotFound."""
        node = self.node_registry.by_name(name)
        if node is None:
            names = (
                ", ".join(sorted(node.info.name for node in self.node_registry.nodes.values()))
                or "none"
            )
            raise NotFound(f"there is no node {name[:64]!r}: nodes are {names}", param="node")
        return node

    def get_service_state(self, node: NodeMember) -> NodeServiceState:
        if node.info.name not in self.node_registry.drains:
            return (
                NodeServiceState.SWITCHING
                if node.info.name in self.node_registry.switching_drains
                else NodeServiceState.IN_SERVICE
            )
        loads, incarnation = self._table.loads, node.incarnation
        empty = is_node_empty(
            self.count_attempts(incarnation), loads.count_quiet_reports(incarnation), node.stats
        )
        return NodeServiceState.DRAINED if empty else NodeServiceState.DRAINING

    def why_not_serving(self) -> str:
        """What keeps the cluster from serving, "" if nothing does."""
        return self._table.why_not_serving()

    @property
    def degradation(self) -> DegradationController:
        return self._table.degradation

    @property
    def is_local_prefill_only(self) -> bool:
        """Do decode nodes compute every prompt although the mode provides for hand-offs?"""
        return self._table.placer.is_local_prefill_only

    def why_no_prefill(self) -> str:
        """Why no prefill node can be given work while decode nodes serve without; "" if one can."""
        return self._table.placer.why_no_prefill()

    def get_model_bounds(self) -> ModelBounds:
        """Raises Unavailable before the first join."""
        return self._request_admitter.model_bounds()

    # inside

    def _find_explanation(self, request: RequestId, now: float) -> ExplainResponse | None:
        record = self._table.records.get(request)
        return (
            build_explanation(record, now)
            if record
            else self._table.ended_requests.explanations.get(request, now)
        )

    def _take_effects(self, now: float) -> list[Effect]:
        self.role_switcher.advance_switches(now)
        self._update_degradation(now)
        self._placement_loop.place_waiting_requests(now)
        return self._table.effects.take_effects()

    def _update_degradation(self, now: float) -> None:
        degradation = self._table.degradation
        change = (
            degradation.apply_sample(self._pressure_monitor.sample(now), now)
            if degradation.is_sample_due(now)
            else None
        )
        if change is not None:
            self._table.wake_placement()
            self._table.admission.on_degradation_changed(now)
            self._table.effects.append_effect(
                DegradationChanged(change.step.value, change.is_taken, change.pressure)
            )

    def _drop_node(self, node: NodeMember, error: BatonError, now: float) -> None:
        self.node_registry.remove_node(node.incarnation)
        self._table.context_capacity.on_node_left(node.info, now)
        self._table.wake_placement()  # what waits for a prefill node may go on without one
        self._table.placement_state.remove_node(node.incarnation)
        expected = self.role_switcher.expects_disconnect(node)
        if not expected:
            self.counters.lost_nodes[error.code] += 1
        self._table.effects.append_effect(
            MemberLost(node.incarnation, node.info.name, error, expected)
        )
        for other in self.node_registry.nodes:
            self._table.effects.send_order(other, PeerLostNotice(node.incarnation))
        self._table.on_node_lost(node.incarnation, error, now)
        self.role_switcher.on_node_lost(node, now)
