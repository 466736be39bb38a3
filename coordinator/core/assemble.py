"""Builds the parts of the brain and connects them."""

from baton.types import RequestId
from coordinator.core.admission.admission_controller import AdmissionController, RetryBudget
from coordinator.core.admission.degradation import DegradationController
from coordinator.core.admission.waiting_queue import WaitingQueue
from coordinator.core.common.counters import Counters
from coordinator.core.common.effects import EffectLog, PlacementSignal, RequestTimers
from coordinator.core.common.settings import BrainSettings
from coordinator.core.membership.node_registry import ContextCapacity, NodeRegistry
from coordinator.core.membership.pool_membership import PoolMembership
from coordinator.core.placement.breakers import CircuitBreakers
from coordinator.core.placement.interface import PlacementPolicy
from coordinator.core.placement.node_loads import NodeLoads
from coordinator.core.placement.placement_state import PlacementState
from coordinator.core.placement.request_placer import LatencyEstimator, RequestPlacer
from coordinator.core.placement.services import PlacementServices
from coordinator.core.ratio.controller import RatioController
from coordinator.core.ratio.role_probe import RoleProber
from coordinator.core.ratio.role_switcher import NodeRoles, RoleSwitcher
from coordinator.core.requests.explain import EndedRequests, RequestExplainer
from coordinator.core.requests.handoff_breakers import HandoffBreakers
from coordinator.core.requests.node_membership import NodeMembership
from coordinator.core.requests.node_reports import NodeReportHandler
from coordinator.core.requests.pressure import PressureMonitor
from coordinator.core.requests.record import RequestRecord
from coordinator.core.requests.request_scheduler import (
    AttemptStarter,
    PlacementLoop,
    RequestAdmitter,
)
from coordinator.core.requests.table import ProgressClock, RequestTable
from coordinator.core.requests.token_reports import TokenReportHandler
from coordinator.core.requests.waiting_requests import (
    OversizedRequests,
    PrefixFollowers,
    RetryScheduler,
    WaitingRequests,
)


class BrainParts:
    """The parts of one brain, each built after those that it needs."""

    def __init__(
        self, registry: NodeRegistry, policy: PlacementPolicy, settings: BrainSettings
    ) -> None:
        self.registry = registry
        self.settings = settings
        self.counters = Counters()
        self.effects = EffectLog()
        self.signal = PlacementSignal()
        self.timers = RequestTimers()
        self.progress = ProgressClock()
        queue = WaitingQueue()
        self.placement = _assemble_placement(registry, queue, policy, settings)
        self.breakers = HandoffBreakers(
            registry, self.placement.breakers, self.counters, self.effects, self.signal
        )
        self.ended_requests = EndedRequests(
            self.counters, self.placement.state.workload_meter, settings
        )
        records: dict[RequestId, RequestRecord] = {}
        self.waiting = _assemble_waiting(
            records, queue, self.timers, self.placement.capacity, settings
        )
        self.table = RequestTable(
            registry,
            settings,
            self.placement,
            self.waiting,
            records=records,
            timers=self.timers,
            counters=self.counters,
            effects=self.effects,
            signal=self.signal,
            progress=self.progress,
            breakers=self.breakers,
            ended_requests=self.ended_requests,
        )
        self.explainer = RequestExplainer(records, self.ended_requests.explanations)
        self._add_request_inputs()
        self._add_reports()
        self._add_roles_and_members()

    def _add_request_inputs(self) -> None:
        self.request_admitter = RequestAdmitter(
            self.table,
            self.placement,
            self.counters,
            max_queue=self.settings.max_queue,
            degraded_max_tokens=self.settings.degraded_max_tokens,
        )
        starter = AttemptStarter(
            self.registry,
            self.placement,
            timers=self.timers,
            counters=self.counters,
            effects=self.effects,
            progress=self.progress,
            reserve_timeout=self.settings.reserve_timeout,
        )
        self.placement_loop = PlacementLoop(
            self.registry, self.table, self.placement, self.waiting, self.signal, starter
        )
        self.pressure_monitor = PressureMonitor(
            self.registry,
            self.table.records,
            self.waiting.queue,
            self.placement,
            self.settings,
            counters=self.counters,
            effects=self.effects,
            signal=self.signal,
        )

    def _add_reports(self) -> None:
        token_handler = TokenReportHandler(
            self.registry,
            self.table,
            self.placement,
            self.waiting,
            counters=self.counters,
            effects=self.effects,
            signal=self.signal,
            progress=self.progress,
        )
        self.report_handler = NodeReportHandler(
            self.registry,
            self.table,
            self.placement,
            token_handler,
            counters=self.counters,
            effects=self.effects,
            signal=self.signal,
            progress=self.progress,
            breakers=self.breakers,
            ended_requests=self.ended_requests,
        )

    def _add_roles_and_members(self) -> None:
        self.role_switcher = RoleSwitcher(
            self.registry,
            self.table,
            NodeRoles(self.registry, self.placement.loads, self.settings.mode),
            RoleProber(self.registry, self.table, self.placement.latency_estimator),
            self.placement.loads,
            self.effects,
            self.signal,
            lambda node, error, now: self.node_membership.drop_node(node, error, now),
        )
        self.node_membership = NodeMembership(
            self.registry,
            self.table,
            self.placement,
            self.role_switcher,
            counters=self.counters,
            effects=self.effects,
            signal=self.signal,
        )
        self.pool_membership = PoolMembership(
            self.registry,
            self.placement.state.pools,
            self.placement.state.prefix_directory,
            self.counters,
            self.effects.append_effect,
        )
        self.ratio_controller = RatioController(
            self.registry,
            self.table.records,
            self.placement.state,
            self.role_switcher,
            self.effects,
            self.settings.default_slo,
        )


def _assemble_placement(
    registry: NodeRegistry,
    queue: WaitingQueue,
    policy: PlacementPolicy,
    settings: BrainSettings,
) -> PlacementServices:
    loads, state, breakers = NodeLoads(), PlacementState(registry), CircuitBreakers()
    capacity = ContextCapacity(registry, hands_off=settings.mode != "colocated")
    latency_estimator = LatencyEstimator(registry, loads, state.cost_model, state.decode_times)
    degradation = DegradationController()
    admission = AdmissionController(queue, settings.queue_limits, latency_estimator, degradation)
    placer = RequestPlacer(
        registry,
        loads,
        policy,
        state,
        capacity,
        admission,
        latency_estimator,
        breakers,
        degradation,
        settings.mode,
        settings.local_prefill_share,
    )
    return PlacementServices(
        loads, state, capacity, latency_estimator, degradation, admission, breakers, placer
    )


def _assemble_waiting(
    records: dict[RequestId, RequestRecord],
    queue: WaitingQueue,
    timers: RequestTimers,
    capacity: ContextCapacity,
    settings: BrainSettings,
) -> WaitingRequests:
    budget = RetryBudget(settings.retry_budget_share)
    return WaitingRequests(
        queue,
        PrefixFollowers(records, queue),
        OversizedRequests(records, queue, capacity, settings.queue_limits),
        RetryScheduler(records, queue, timers, budget, settings.max_queue),
    )
