"""The coordinator's pure core behind one class: inputs with their time in, effects in order out.

Its shell is `coordinator/node_links/dispatcher.py`; simulators are others.
"""

import math
from collections.abc import Sequence

from baton.cluster_link.messages import Heartbeat, JoinInfo, NodeReport, PoolJoinInfo, StepTokens
from baton.errors import BatonError, RequestRejected
from baton.limits import ModelBounds
from baton.role_split import RoleSplit
from baton.slo import Slo
from baton.types import FinishReason, Incarnation, NodeName, Principal, Request, RequestId, Role
from coordinator.core.admission.tenants import TenantTable
from coordinator.core.assemble import BrainParts
from coordinator.core.common.effects import Effect
from coordinator.core.common.settings import BrainSettings
from coordinator.core.membership.node_registry import NodeMember, NodeRegistry, NodeServiceState
from coordinator.core.membership.pool_registry import PoolMember
from coordinator.core.placement.interface import PlacementPolicy
from coordinator.core.requests.explanation import RequestExplanation
from coordinator.core.requests.record import RequestState


class Brain:
    """The coordinator's decisions. Every input returns effects that its caller must carry out."""

    def __init__(
        self, registry: NodeRegistry, policy: PlacementPolicy, settings: BrainSettings
    ) -> None:
        self.parts = BrainParts(registry, policy, settings)
        self.node_registry = registry
        self.counters = self.parts.counters
        self.placement_state = self.parts.placement.state
        self.breakers = self.parts.placement.breakers
        self.degradation = self.parts.placement.degradation
        self.retries = self.parts.waiting.retries
        self.role_switcher = self.parts.role_switcher
        self.ratio_controller = self.parts.ratio_controller
        self._table = self.parts.table
        self._membership = self.parts.node_membership
        # when members, role switches or the ratio next need a tick; None is never
        self._member_deadline: float | None = None
        self._is_member_deadline_known = False

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
        self.parts.request_admitter.admit_requests(requests, now, internal=internal)
        return self._act(now)

    def count_rejection(self, error: RequestRejected, tenant_class: str, now: float) -> None:
        """Count a request that was rejected before it was submitted."""
        self.parts.request_admitter.count_rejection(error, tenant_class, now)

    def require_admission(
        self, principal: Principal, count: int, timeout: float, now: float
    ) -> None:
        """Check whether `count` requests would be admitted, before their prompts are tokenized.
        Raises ShuttingDown, Overloaded or InvalidRequest; not counted."""
        self.parts.request_admitter.check_admission(principal, count, timeout, now)

    def reload_tenants(self, tenants: TenantTable, now: float) -> list[Effect]:
        """Replace the tenants. Running requests keep their principals."""
        self.parts.placement.admission.reload_tenants(tenants, now)
        self.parts.signal.request_pass()
        return self._act(now)

    def join_node(self, info: JoinInfo, incarnation: Incarnation, now: float) -> list[Effect]:
        """A node joins as `incarnation` and replaces an older one of its process. Raises
        ConfigError, counted: see `NodeRegistry.check_join`. The first node of another model ends
        the requests that were admitted under the former one."""
        self._membership.join_node(info, incarnation, now)
        return self._act_on_members(now)

    def join_pool(self, info: PoolJoinInfo, incarnation: Incarnation, now: float) -> list[Effect]:
        """A host's pool joins, replacing an older one of its name. Raises ConfigError, counted."""
        self.parts.pool_membership.join_pool(info, incarnation, now)
        return self._act_on_members(now)

    def receive_report(self, sender: Incarnation, message: NodeReport, now: float) -> list[Effect]:
        """Apply a report of a node or pool; it is dropped if `sender` is no member."""
        if self.parts.pool_membership.receive_report(sender, message, now):
            return self._act_on_members(now)
        node = self.node_registry.nodes.get(sender)
        if node is None:
            self.counters.dropped_messages["stale"] += 1
            return []
        node.heard_at = now
        self.parts.report_handler.handle_message(sender, message, now)
        if isinstance(message, StepTokens):  # by far the most frequent reports
            return self._act(now)
        if isinstance(message, Heartbeat):
            self.role_switcher.on_heartbeat()
        return self._act_on_members(now)

    def remove_member(
        self, incarnation: Incarnation, error: BatonError, now: float
    ) -> list[Effect]:
        """Remove a node or a pool, whose stream ended. Idempotent."""
        self.parts.pool_membership.remove_pool(incarnation, error)
        node = self.node_registry.nodes.get(incarnation)
        if node is not None:
            self._membership.drop_node(node, error, now)
        return self._act_on_members(now)

    def cancel_request(self, request: RequestId, error: BatonError, now: float) -> list[Effect]:
        """End a request with `error`, in any state; does nothing after its end."""
        record = self._table.records.get(request)
        if record is not None:
            self._table.end_request(record, error, now)
        return self._act_on_members(now)

    def stop_request(self, request: RequestId, now: float) -> list[Effect]:
        """End a request successfully: its client needs no more. Does nothing after its end."""
        record = self._table.records.get(request)
        if record is not None:
            self._table.end_request(record, FinishReason.STOP, now)
        return self._act_on_members(now)

    def start_draining(self) -> None:
        """Reject new requests from now on; requests that are here continue."""
        self.parts.request_admitter.is_draining = True

    def drain_node(self, name: NodeName, timeout: float | None, now: float) -> list[Effect]:
        """Give the node no new work, and replace what it still has after `timeout` seconds (None:
        never). Raises NotFound."""
        self._membership.start_drain(name, None if timeout is None else now + timeout)
        return self.tick(now)

    def undrain_node(self, name: NodeName, now: float) -> list[Effect]:
        """Put a node back in service, if it is not. Raises NotFound for an unknown name."""
        self._membership.end_drain(name)
        return self._act_on_members(now)

    def set_ratio(self, target: RoleSplit, drain_timeout: float, now: float) -> list[Effect]:
        """Switch the roles of nodes until they have this ratio, and keep it. What a node still does
        `drain_timeout` seconds after it was chosen is placed again. Ends `set_auto_ratio`. Raises
        InvalidRequest, naming the possible splits."""
        self.role_switcher.set_target(target, drain_timeout)
        self.ratio_controller.disable_auto()
        return self._act_on_members(now)

    def set_auto_ratio(self, slo: Slo | None, drain_timeout: float, now: float) -> list[Effect]:
        """Change the ratio to keep an SLO, None for the default one, until `set_manual_ratio` or
        `set_ratio`."""
        self.ratio_controller.enable_auto(slo, drain_timeout, now)
        return self._act_on_members(now)

    def set_manual_ratio(self) -> None:
        """Stop changing the ratio. Idempotent. Pending role switches continue."""
        self.ratio_controller.disable_auto()
        self._is_member_deadline_known = False

    def tick(self, now: float) -> list[Effect]:
        """Handle what time alone has made due: silent and stalled nodes, deadlines, drains and role
        switches; and sweep a slice of the prefix directory."""
        self.placement_state.prefix_directory.sweep_slice()
        self._membership.drop_expired_nodes(now)
        self.parts.pool_membership.remove_silent_pools(now)
        self._membership.evacuate_due_drains(now)
        self.parts.breakers.half_open_due_pairs(now)
        self.role_switcher.run_due(now)
        self.ratio_controller.adjust_if_due(now)
        for request in self.parts.timers.pop_due(now):
            self._table.on_request_timer(request, now)
        return self._act_on_members(now)

    def next_tick_at(self) -> float | None:
        """Return when `tick` must be called next if no other input comes."""
        if not self._is_member_deadline_known:
            self._member_deadline = self._compute_member_deadline()
            self._is_member_deadline_known = True
        waiting = len(self.parts.waiting.queue) > 0
        may_degrade = waiting or self.degradation.active_steps
        retries = self.parts.waiting.retries
        times = (
            self._member_deadline,
            self.parts.timers.next_timer_at(),
            # for requests held back; earlier only if more requests arrive
            retries.budget.next_expiry_at() if retries.held_back_since else None,
            self.degradation.next_sample_at(waiting=waiting) if may_degrade else None,
        )
        return min((time for time in times if time is not None), default=None)

    # views

    @property
    def tenant_classes(self) -> tuple[str, ...]:
        """The classes of the tenants file, or the one class of all clients."""
        return self.parts.placement.admission.tenants.classes

    def list_members(self) -> list[NodeMember | PoolMember]:
        """Return all nodes and pools."""
        return [*self.node_registry.nodes.values(), *self.placement_state.pools.members.values()]

    @property
    def is_draining(self) -> bool:
        """Whether new requests are rejected because the cluster is stopping."""
        return self.parts.request_admitter.is_draining

    @property
    def queued_requests(self) -> int:
        """Number of requests that wait to be placed."""
        return self.parts.waiting.request_count

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of the requests in the queue."""
        return self.parts.waiting.queue.backlog.total_prompt_tokens

    @property
    def running_requests(self) -> int:
        """Number of requests that are placed and have not ended."""
        return len(self._table.records) - self.queued_requests

    @property
    def constrained_requests(self) -> int:
        """Number of requests that have not ended and whose outputs have a grammar."""
        return sum(
            record.request.sampling.structured_output is not None
            for record in self._table.records.values()
        )

    def seconds_without_progress(self, now: float) -> float:
        """Return for how long there have been requests and none of them made progress."""
        return now - self.parts.progress.last_progress_at if self._table.records else 0.0

    def list_active_requests(self) -> list[RequestId]:
        return list(self._table.records)

    def get_request_state(self, request: RequestId) -> RequestState | None:
        """Return the state of a request, None after its end."""
        return record.state if (record := self._table.records.get(request)) else None

    def explain_request(self, request: RequestId, now: float) -> RequestExplanation:
        """Explain a running or recently ended request, with its siblings if it is the first choice.
        Raises NotFound."""
        return self.parts.explainer.explain_request(request, now)

    def count_attempts(self, node: Incarnation) -> int:
        """Count the attempts that have a leg on the node."""
        return self._membership.count_attempts(node)

    def get_node(self, name: NodeName) -> NodeMember:
        """Raises NotFound."""
        return self._membership.get_node(name)

    def get_service_state(self, node: NodeMember) -> NodeServiceState:
        """Return whether the node is given new work, and if not, whether it still has some."""
        return self._membership.get_service_state(node)

    def why_not_serving(self) -> str:
        """Return what keeps the cluster from serving, "" if nothing does. Decode nodes can serve
        alone: see `RequestPlacer`."""
        return self.node_registry.why_unavailable(Role.DECODE)

    @property
    def is_local_prefill_only(self) -> bool:
        """Whether decode nodes compute every prompt although the mode provides for hand-offs."""
        return self.parts.placement.placer.is_local_prefill_only

    def why_no_prefill(self) -> str:
        """Return why no prefill node can be given work while decode nodes serve without; "" if one
        can."""
        return self.parts.placement.placer.why_no_prefill()

    def get_model_bounds(self) -> ModelBounds:
        """Return the bounds of requests. Raises ServiceUnavailable before the first join."""
        return self.parts.request_admitter.model_bounds()

    # inside

    def _act_on_members(self, now: float) -> list[Effect]:
        """Act on an input that may have changed a deadline of members, drains or switches."""
        self._is_member_deadline_known = False
        return self._act(now)

    def _act(self, now: float) -> list[Effect]:
        """Do what has become possible, and return all effects of the input."""
        if self.role_switcher.needs_attention:
            self._is_member_deadline_known = False
            self.role_switcher.advance_switches(now)
        if now >= self.degradation.sample_due_at:
            self.parts.pressure_monitor.update_degradation(now)
        self.parts.placement_loop.place_waiting_requests(now)
        return self.parts.effects.take_effects()

    def _compute_member_deadline(self) -> float | None:
        directory = self.placement_state.prefix_directory
        times = (
            -math.inf if directory.needs_sweep else None,  # as soon as others have had their turn
            self.node_registry.next_silence_at(),
            self.node_registry.drains.next_deadline(),
            self.placement_state.pools.next_silence_at(),
            self.breakers.next_half_open_at(),
            self.role_switcher.next_due_at(),
            self.ratio_controller.next_evaluation_at(),
        )
        return min((time for time in times if time is not None), default=None)
