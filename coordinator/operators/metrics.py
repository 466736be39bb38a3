"""Prometheus metrics. The brain counts; a collector reads what it has counted at each scrape, and
what nodes last reported. Only durations are observed as they happen."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.pb.cluster_pb2 import Latency, NodeStats
from baton.process import log
from baton.process.clock import Clock
from baton.types import Role
from coordinator.core.admission.degradation import DegradationStep
from coordinator.core.brain import Brain
from coordinator.core.common.breaker_state import BreakerState
from coordinator.core.common.counters import INTERNAL_CLASS
from coordinator.core.common.messages import EndRequest, RoleSwitchReport
from coordinator.core.estimates.latency_window import LatencyWindow
from coordinator.core.membership.pool_registry import POOL_ROLE
from coordinator.frontend.unknown_fields import REJECT_UNKNOWN_FIELDS, UnknownFieldPolicy
from coordinator.node_links.dispatcher import Dispatcher
from coordinator.operators.metric_labels import list_known_labels
from coordinator.operators.port_connections import PortConnections

ROLE_SWITCH_PHASES = ("drain", "switch", "probe")  # of a change of role
TTFT_STAGES = ("queue", "reserve", "prefill", "transfer", "first_token")
MAX_NODE_COUNTERS = 512  # of one node
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
_BLOCK_STATES = ("free", "cached", "reserved", "writing", "in_use", "quarantined")
_COUNTER_KEY = re.compile(r"(?P<name>[a-z][a-z0-9_]*)(\{(?P<labels>.*)\})?")
_LABEL = re.compile(r'(?P<key>[a-z_]+)="(?P<value>[^"]*)"')


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


class BrainCollector(Collector):
    def __init__(self, brain: Brain, clock: Clock) -> None:
        self._brain = brain
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        counters = self.coordinator_counters()
        _add_zero_series(counters, self._brain.tenant_classes)
        own: list[Metric] = [*counters, *self._coordinator_gauges()]
        yield from own
        taken = {family.name for family in own}
        yield from self._node_metrics(taken)

    def coordinator_counters(self) -> list[CounterMetricFamily]:
        counted, resyncs = (
            self._brain.counters,
            self._brain.placement_state.prefix_directory.resync_count,
        )
        steps, retries = self._brain.degradation.change_counts, self._brain.retries
        return [
            _counter_family(
                "baton_requests_total", "Requests ended", ["outcome", "class"], counted.requests
            ),
            _counter_family(
                "baton_rejected_total",
                "Requests not admitted",
                ["reason", "class"],
                counted.rejected,
            ),
            _counter_family(
                "baton_prompt_tokens_total",
                "Prompt tokens by source",
                ["source"],
                counted.prompt_tokens,
            ),
            _counter_family(
                "baton_generated_tokens_total", "Output tokens", [], {(): counted.generated_tokens}
            ),
            _counter_family(
                "baton_handoffs_total",
                "Hand-offs ended",
                ["outcome", "transport"],
                counted.handoffs,
            ),
            _counter_family(
                "baton_handoff_bytes_total",
                "Bytes handed over",
                ["transport"],
                counted.handoff_bytes,
            ),
            _counter_family(
                "baton_placements_total",
                "Attempts, by who computes the prompt",
                ["way", "why"],
                counted.placements,
            ),
            _counter_family(
                "baton_replaced_total",
                "Requests placed again",
                ["reason"],
                counted.replaced_attempts,
            ),
            _counter_family(
                "baton_recomputed_tokens_total",
                "Tokens computed again",
                ["reason"],
                counted.recomputed_tokens,
            ),
            _counter_family(
                "baton_dropped_messages_total",
                "Messages of nodes dropped",
                ["reason"],
                counted.dropped_messages,
            ),
            _counter_family(
                "baton_retries_held_back_total",
                "Retries that waited for the budget",
                [],
                {(): retries.held_back_total},
            ),
            _counter_family(
                "baton_breaker_changes_total",
                "Breakers that came into a state",
                ["state"],
                counted.breaker_changes,
            ),
            _counter_family("baton_joins_total", "Nodes that came", ["outcome"], counted.joins),
            _counter_family(
                "baton_nodes_lost_total", "Nodes given up", ["reason"], counted.lost_nodes
            ),
            _counter_family(
                "baton_prefix_directory_resyncs_total",
                "Snapshots asked of nodes",
                [],
                {(): resyncs},
            ),
            _counter_family(
                "baton_degradation_changes_total",
                "Steps taken and taken back",
                ["step", "change"],
                steps,
            ),
            _counter_family(
                "baton_role_switches_total",
                "Changes of role",
                ["role", "outcome"],
                self._brain.role_switcher.outcome_counts,
            ),
            _counter_family(
                "baton_ratio_moves_total",
                "Changes of the ratio by auto",
                [],
                {(): self._brain.ratio_controller.change_count},
            ),
            _counter_family(
                "baton_log_lines_dropped_total",
                "Log lines that nobody took",
                [],
                {(): log.get_dropped_lines()},
            ),
        ]

    def _coordinator_gauges(self) -> list[Metric]:
        nodes = list(self._brain.node_registry.nodes.values())
        depth = GaugeMetricFamily(
            "baton_queue_depth", "Requests waiting, by where they wait", labels=["role"]
        )
        depth.add_metric(["coordinator"], self._brain.queued_requests)
        tokens = GaugeMetricFamily(
            "baton_queue_tokens", "Prompt tokens of waiting requests", self._brain.queued_tokens
        )
        for role in Role:
            reported = [
                node.stats for node in nodes if node.info.role is role and node.stats is not None
            ]
            depth.add_metric([role.value], sum(stats.waiting for stats in reported))
        roles = GaugeMetricFamily(
            "baton_node_role", "1 for the role a node has", labels=["node", "role"]
        )
        blocks = GaugeMetricFamily(
            "baton_kv_blocks", "KV blocks of a node, by state", labels=["node", "state"]
        )
        attempts = GaugeMetricFamily(
            "baton_node_attempts", "Attempts placed on a node", labels=["node"]
        )
        for node in nodes:
            roles.add_metric([node.info.name, node.info.role.value], 1)
            attempts.add_metric([node.info.name], self._brain.count_attempts(node.incarnation))
            for state in _BLOCK_STATES if node.stats is not None else ():
                blocks.add_metric([node.info.name, state], getattr(node.stats, f"blocks_{state}"))
        for pool in self._brain.placement_state.pools.members.values():
            roles.add_metric([pool.info.name, POOL_ROLE], 1)
            for state in _BLOCK_STATES if pool.stats is not None else ():
                blocks.add_metric([pool.info.name, state], getattr(pool.stats, f"blocks_{state}"))
        known = self._brain.placement_state
        errors = GaugeMetricFamily(
            "baton_prediction_error_ratio",
            "Mean relative error of the last predictions",
            labels=["quantity"],
        )
        for quantity, error in known.prediction_errors.items():
            errors.add_metric([quantity], error)
        directory = GaugeMetricFamily(
            "baton_prefix_directory_blocks",
            "Different blocks in nodes' caches, as told",
            len(known.prefix_directory),
        )
        degraded = GaugeMetricFamily(
            "baton_degradation_step", "1 while a step is taken", labels=["step"]
        )
        for step in DegradationStep:
            degraded.add_metric([step.value], float(step in self._brain.degradation))
        pressure = GaugeMetricFamily(
            "baton_pressure_ratio",
            "Longest wait to be placed, over what its class may wait",
            self._brain.degradation.last_sample.pressure or 0.0,
        )
        local = GaugeMetricFamily(
            "baton_local_prefill_only",
            "1 while decode nodes compute every prompt although the mode provides for hand-offs",
            float(self._brain.is_local_prefill_only),
        )
        breakers = GaugeMetricFamily(
            "baton_breakers", "Pairs of nodes that are kept apart, by state", labels=["state"]
        )
        for kept in (BreakerState.OPEN, BreakerState.HALF_OPEN):
            breakers.add_metric([kept.value], self._brain.breakers.count_in_state(kept))
        now, retries = self._clock(), self._brain.retries
        left = GaugeMetricFamily(
            "baton_retry_budget",
            "Retries that may be made now",
            retries.budget.available_retries(now),
        )
        held = GaugeMetricFamily(
            "baton_retries_waiting",
            "Requests that wait for the retry budget",
            retries.held_back_count,
        )
        still = GaugeMetricFamily(
            "baton_stood_still_seconds",
            "Since any request got further, if there is one",
            self._brain.seconds_without_progress(now),
        )
        running = GaugeMetricFamily(
            "baton_requests_running", "Requests placed and not ended", self._brain.running_requests
        )
        wanted = GaugeMetricFamily(
            "baton_ratio_target", "Nodes that are to have a role", labels=["role"]
        )
        target = self._brain.role_switcher.target_split
        for role in Role if target is not None else ():
            wanted.add_metric([role.value], target.node_count(role) if target else 0)
        own = [
            depth,
            tokens,
            roles,
            blocks,
            attempts,
            errors,
            directory,
            running,
            wanted,
            breakers,
            left,
            held,
            still,
        ]
        return [*own, degraded, pressure, local, *self._ratio_gauges()]

    def _ratio_gauges(self) -> list[Metric]:
        pilot = self._brain.ratio_controller
        good = GaugeMetricFamily(
            "baton_goodput_ratio", "Requests of the last minute within the SLO, of all that ended"
        )
        share = pilot.get_slo_results(self._clock()).attainment
        if share is not None:
            good.add_metric([], share)
        return [
            good,
            GaugeMetricFamily(
                "baton_ratio_auto", "1 while the ratio is automatic", int(pilot.is_automatic)
            ),
        ]

    def _node_metrics(self, taken: set[str]) -> Iterator[Metric]:
        """Nodes' own counters, with the node as a label. One that has a name of ours is put beside
        it."""
        families: dict[str, Metric] = {}
        for node in self._brain.list_members():
            for name, labels, value in _parse_node_counters(node.stats):
                base = name.removesuffix("_total")
                if not name.startswith("baton_") or base in taken:
                    name = f"baton_node_{name.removeprefix('baton_')}"
                kind = "counter" if name.endswith("_total") else "gauge"
                family = families.setdefault(
                    name, Metric(name.removesuffix("_total"), "As counted by the node", kind)
                )
                family.add_sample(name, labels | {"node": node.info.name}, value)
        yield from families.values()


def _counter_family(
    name: str, help_text: str, labels: list[str], values: Mapping[Any, int]
) -> CounterMetricFamily:
    """Keys of `values` are label values: a tuple, or one string."""
    family = CounterMetricFamily(name, help_text, labels=labels)
    for key, value in values.items():
        family.add_metric([key] if isinstance(key, str) else list(key), value)
    return family


def _add_zero_series(counters: Sequence[CounterMetricFamily], classes: Sequence[str]) -> None:
    """Add the series that are known and have not been counted yet, at 0."""
    known = list_known_labels(classes)
    for family in counters:
        counted = {tuple(sample.labels.values()) for sample in family.samples}
        for labels in known.get(f"{family.name}_total", ()):
            if labels not in counted:
                family.add_metric(labels, 0)


def _parse_node_counters(stats: NodeStats | None) -> Iterable[tuple[str, dict[str, str], float]]:
    """`name` or `name{key="value",...}`; what is neither is left out."""
    for number, (text, value) in enumerate(sorted(stats.counters.items()) if stats else ()):
        match = _COUNTER_KEY.fullmatch(text)
        if match is None or number >= MAX_NODE_COUNTERS:
            continue
        yield match["name"], dict(_LABEL.findall(match["labels"] or "")), value
