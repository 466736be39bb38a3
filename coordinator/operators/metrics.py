"""The Prometheus metrics of the coordinator.

Counters and gauges are collected at each scrape (brain_collector.py); durations are observed here
as requests and role switches end.
"""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from baton.pb.cluster_pb2 import Latency
from coordinator.core.common.counters import INTERNAL_CLASS
from coordinator.core.common.effects import EndRequest, RoleSwitchReport
from coordinator.frontend.unknown_fields import REJECT_UNKNOWN_FIELDS, UnknownFieldPolicy
from coordinator.node_links.dispatcher import Dispatcher
from coordinator.operators.brain_collector import BrainCollector
from coordinator.operators.latency_window import LatencyWindow
from coordinator.operators.port_connections import PortConnections

ROLE_SWITCH_PHASES = ("drain", "switch", "probe")
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
    """All metrics of one coordinator; /metrics exposes its `registry`."""

    def __init__(
        self, dispatcher: Dispatcher, unknown_fields: UnknownFieldPolicy = REJECT_UNKNOWN_FIELDS
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._brain = dispatcher.brain
        self.registry.register(_BeforeScrape(self._initialise_histograms))
        self._ttft = self._add_histogram(
            "baton_request_ttft_seconds",
            "Time from the arrival of a request to its first token",
            "class",
        )
        self._tpot = self._add_histogram(
            "baton_request_tpot_seconds", "Time per output token after the first", "class"
        )
        self._stage = self._add_histogram(
            "baton_request_stage_seconds",
            "Parts of the time to the first token; they add up to it",
            "stage",
        )
        self._role_switch = self._add_histogram(
            "baton_role_switch_seconds", "Phases of a role switch", "phase"
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

    def _add_histogram(self, name: str, help_text: str, label: str) -> Histogram:
        return Histogram(
            name, help_text, [label], buckets=_DURATION_BUCKETS, registry=self.registry
        )

    def add_port_connections(self, ports: PortConnections) -> None:
        """Expose the connection counts of this process's ports, too."""
        self._port_connections = ports
        self.registry.register(ports)

    def observe_request(self, end: EndRequest) -> None:
        """Observe the durations of a request, if it had a first token."""
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
        """Create the histograms of every class before its first request, and after a reload."""
        for tenant_class in (*self._brain.tenant_classes, INTERNAL_CLASS):
            self._ttft.labels(tenant_class)
            self._tpot.labels(tenant_class)

    def get_latency_summary(self) -> Latency:
        """Latencies of the recent requests of clients."""
        return self._recent_latency.compute_latency(self._clock())

    def get_counter_values(self) -> dict[str, float]:
        """Return the coordinator's counted series by name, `name{label="value"}`."""
        found: dict[str, float] = {}
        ports = [self._port_connections.build_refused_counter()] if self._port_connections else []
        for family in [*self._collector.coordinator_counters(), *ports]:
            for sample in family.samples:
                labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found


class _BeforeScrape(Collector):
    """Calls a function at each scrape before the other collectors run; it is registered first."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def collect(self) -> Iterable[Metric]:
        self._run()
        return ()
