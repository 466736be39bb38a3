"""Prometheus metrics. The brain counts; a collector reads what it has counted at each scrape, and
what nodes last reported. Only durations are observed as they happen."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from baton.pb.cluster_pb2 import Latency
from coordinator.core.common.counters import INTERNAL_CLASS
from coordinator.core.common.messages import EndRequest, RoleSwitchReport
from coordinator.core.estimates.latency_window import LatencyWindow
from coordinator.frontend.unknown_fields import REJECT_UNKNOWN_FIELDS, UnknownFieldPolicy
from coordinator.node_links.dispatcher import Dispatcher
from coordinator.operators.brain_collector import BrainCollector
from coordinator.operators.port_connections import PortConnections

ROLE_SWITCH_PHASES = ("drain", "switch", "probe")  # of a change of role
TTFT_STAGES = ("queue", "reserve", "prefill", "transfer", "first_token")
_DURATION_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
)


class CoordinatorMetrics:
    """`registry` is what /metrics exposes."""

    def __init__(
        self, dispatcher: Dispatcher, unknown_fields: UnknownFieldPolicy = REJECT_UNKNOWN_FIELDS
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._brain = dispatcher.brain
        self.registry.register(_BeforeScrape(self._initialise_histograms))
        self._ttft = Histogram(
            "baton_request_ttft_seconds",
            "Time from the arrival of a request to its first token",
            ["class"],
            buckets=_DURATION_BUCKETS,
            registry=self.registry,
        )
        self._tpot = Histogram(
            "baton_request_tpot_seconds",
            "Time per output token after the first",
            ["class"],
            buckets=_DURATION_BUCKETS,
            registry=self.registry,
        )
        self._stage = Histogram(
            "baton_request_stage_seconds",
            "Parts of the time to the first token; they add up to it",
            ["stage"],
            buckets=_DURATION_BUCKETS,
            registry=self.registry,
        )
        self._role_switch = Histogram(
            "baton_role_switch_seconds",
            "Parts of a change of role that a node has made",
            ["phase"],
            buckets=_DURATION_BUCKETS,
            registry=self.registry,
        )
        self._recent_latency = LatencyWindow()
        self._clock = dispatcher.clock
        self._collector = BrainCollector(dispatcher.brain, dispatcher.clock)
        self.registry.register(self._collector)
        self._port_connections: PortConnections | None = None
        for stage in TTFT_STAGES:
            self._stage.labels(stage)
        for phase in ROLE_SWITCH_PHASES:
            self._role_switch.labels(phase)
        self.registry.register(unknown_fields)
        dispatcher.on_request_end.append(self.observe_request)
        dispatcher.on_role_switch.append(self.observe_role_switch)

    def add_port_connections(self, ports: PortConnections) -> None:
        """Tell also what the ports of this process hold."""
        self._port_connections = ports
        self.registry.register(ports)

    def observe_request(self, end: EndRequest) -> None:
        """The durations of a request that had a first token."""
        if end.ttft_seconds is None:
            return
        label = end.tenant_class
        tpot = (
            (end.timeline.total - end.ttft_seconds) / (end.output_tokens - 1)
            if end.output_tokens > 1
            else None
        )
        self._ttft.labels(label).observe(end.ttft_seconds)
        if tpot is not None:
            self._tpot.labels(label).observe(tpot)
        if not end.is_internal:
            self._recent_latency.add_request(self._clock(), end.ttft_seconds, tpot)
            for stage in TTFT_STAGES:
                self._stage.labels(stage).observe(getattr(end.timeline, stage))

    def observe_role_switch(self, switch: RoleSwitchReport) -> None:
        if switch.outcome == "done":
            for phase in ROLE_SWITCH_PHASES:
                self._role_switch.labels(phase).observe(getattr(switch, f"{phase}_seconds"))

    def _initialise_histograms(self) -> None:
        """Every class has its histograms before its first request; a reload of the tenants may have
        brought others."""
        for tenant_class in (*self._brain.tenant_classes, INTERNAL_CLASS):
            self._ttft.labels(tenant_class)
            self._tpot.labels(tenant_class)

    def get_latency_summary(self) -> Latency:
        """Of the last requests of clients."""
        return self._recent_latency.compute_latency(self._clock())

    def get_counter_values(self) -> dict[str, float]:
        """The coordinator's own counters, as `name{label="value"}`; only what has been counted."""
        found: dict[str, float] = {}
        ports = [self._port_connections.build_refused_counter()] if self._port_connections else []
        for family in [*self._collector.coordinator_counters(), *ports]:
            for sample in family.samples:
                labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found


class _BeforeScrape(Collector):
    """Registered first, so that it runs before the others at each scrape. It has no metrics of its
    own."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def collect(self) -> Iterable[Metric]:
        self._run()
        return ()
