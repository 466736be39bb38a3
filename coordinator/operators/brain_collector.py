"""Collects what the brain has counted and what nodes last reported, at each scrape of /metrics."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.cluster_link.messages import POOL_ROLE
from baton.cluster_link.report_types import NodeStats
from baton.process import log
from baton.process.clock import Clock
from baton.types import Role
from coordinator.core.admission.degradation import DegradationStep
from coordinator.core.brain import Brain
from coordinator.core.common.breaker_state import BreakerState
from coordinator.operators.metric_labels import list_known_labels

MAX_NODE_COUNTERS = 512  # counters exposed of one node
_BLOCK_STATES = ("free", "cached", "reserved", "writing", "in_use", "quarantined")
_COUNTER_KEY = re.compile(r"(?P<name>[a-z][a-z0-9_]*)(\{(?P<labels>.*)\})?")
_LABEL = re.compile(r'(?P<key>[a-z_]+)="(?P<value>[^"]*)"')


class BrainCollector(Collector):
    """Reads the coordinator's counters and gauges, and the nodes' own counters, at each scrape."""

    def __init__(self, brain: Brain, clock: Clock) -> None:
        self._brain = brain
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        counters = self.coordinator_counters()
        _add_zero_series(counters, self._brain.tenant_classes)
        own: list[Metric] = [
            *counters,
            *self._queue_gauges(),
            *self._member_gauges(),
            *self._device_gauges(),
            *self._retry_gauges(),
            *self._ratio_gauges(),
        ]
        yield from own
        yield from self._node_metrics({family.name for family in own})

    def coordinator_counters(self) -> list[CounterMetricFamily]:
        return [
            *self._request_counters(),
            *self._cluster_counters(),
            *self._change_counters(),
        ]

    def _request_counters(self) -> Iterator[CounterMetricFamily]:
        counts, retries = self._brain.counters, self._brain.retries
        for name, help_text, labels, values in (
            ("requests", "Requests ended, by outcome", ["outcome", "class"], counts.requests),
            ("rejected", "Requests rejected, by reason", ["reason", "class"], counts.rejected),
            ("prompt_tokens", "Prompt tokens, by KV source", ["source"], counts.prompt_tokens),
            ("generated_tokens", "Output tokens generated", [], {(): counts.generated_tokens}),
            ("handoffs", "KV hand-offs ended", ["outcome", "transport"], counts.handoffs),
            ("handoff_bytes", "Bytes of KV handed off", ["transport"], counts.handoff_bytes),
            (
                "placements",
                "Attempts placed, by where the prompt is computed and why",
                ["way", "why"],
                counts.placements,
            ),
            ("replaced", "Requests placed again", ["reason"], counts.replaced_attempts),
            ("recomputed_tokens", "Tokens computed again", ["reason"], counts.recomputed_tokens),
            (
                "retries_held_back",
                "Retries that waited for the retry budget",
                [],
                {(): retries.held_back_total},
            ),
        ):
            yield _counter_family(f"baton_{name}_total", help_text, labels, values)

    def _cluster_counters(self) -> Iterator[CounterMetricFamily]:
        counts, directory = self._brain.counters, self._brain.placement_state.prefix_directory
        for name, help_text, labels, values in (
            (
                "dropped_messages",
                "Messages from nodes that were dropped, by reason",
                ["reason"],
                counts.dropped_messages,
            ),
            (
                "breaker_changes",
                "State changes of circuit breakers, by new state",
                ["state"],
                counts.breaker_changes,
            ),
            ("joins", "Join requests of nodes and pools, by outcome", ["outcome"], counts.joins),
            ("nodes_lost", "Nodes and pools lost, by reason", ["reason"], counts.lost_nodes),
            (
                "prefix_directory_resyncs",
                "Cache snapshots requested from nodes after a gap in their cache events",
                [],
                {(): directory.resync_count},
            ),
        ):
            yield _counter_family(f"baton_{name}_total", help_text, labels, values)

    def _change_counters(self) -> Iterator[CounterMetricFamily]:
        """Count what the coordinator changes by itself, and lost log lines."""
        brain = self._brain
        for name, help_text, labels, values in (
            (
                "degradation_changes",
                "Degradation steps taken and taken back",
                ["step", "change"],
                brain.degradation.change_counts,
            ),
            (
                "role_switches",
                "Role switches ended",
                ["role", "outcome"],
                brain.role_switcher.outcome_counts,
            ),
            (
                "ratio_moves",
                "Ratio changes made automatically",
                [],
                {(): brain.ratio_controller.change_count},
            ),
            (
                "log_lines_dropped",
                "Log lines that were not written",
                [],
                {(): log.get_dropped_lines()},
            ),
        ):
            yield _counter_family(f"baton_{name}_total", help_text, labels, values)

    def _queue_gauges(self) -> Iterator[Metric]:
        brain = self._brain
        depth = GaugeMetricFamily(
            "baton_queue_depth", "Requests waiting, by where they wait", labels=["role"]
        )
        depth.add_metric(["coordinator"], brain.queued_requests)
        for role in Role:
            nodes = brain.node_registry.nodes.values()
            stats = [
                node.stats for node in nodes if node.info.role is role and node.stats is not None
            ]
            depth.add_metric([role.value], sum(reported.waiting for reported in stats))
        yield depth
        yield GaugeMetricFamily(
            "baton_queue_tokens", "Prompt tokens of waiting requests", brain.queued_tokens
        )
        yield GaugeMetricFamily(
            "baton_requests_running", "Requests placed and not ended", brain.running_requests
        )
        yield GaugeMetricFamily(
            "baton_requests_constrained",
            "Requests that have not ended and whose outputs have a grammar",
            brain.constrained_requests,
        )
        yield GaugeMetricFamily(
            "baton_stood_still_seconds",
            "Seconds since any request made progress; 0 without requests",
            brain.seconds_without_progress(self._clock()),
        )
        degraded = GaugeMetricFamily(
            "baton_degradation_step", "1 while a degradation step is taken, else 0", labels=["step"]
        )
        for step in DegradationStep:
            degraded.add_metric([step.value], float(step in brain.degradation.active_steps))
        yield degraded
        yield GaugeMetricFamily(
            "baton_pressure_ratio",
            "Longest wait to be placed, divided by the longest wait allowed for its class",
            brain.degradation.last_sample.pressure or 0.0,
        )

    def _member_gauges(self) -> Iterator[Metric]:
        state = self._brain.placement_state
        roles = GaugeMetricFamily(
            "baton_node_role", "1 for the role a node has", labels=["node", "role"]
        )
        blocks = GaugeMetricFamily(
            "baton_kv_blocks", "KV blocks of a node, by state", labels=["node", "state"]
        )
        attempts = GaugeMetricFamily(
            "baton_node_attempts", "Attempts placed on a node", labels=["node"]
        )
        for node in self._brain.node_registry.nodes.values():
            roles.add_metric([node.info.name, node.info.role.value], 1)
            attempts.add_metric([node.info.name], self._brain.count_attempts(node.incarnation))
            _add_block_counts(blocks, node.info.name, node.stats)
        for pool in state.pools.members.values():
            roles.add_metric([pool.info.name, POOL_ROLE], 1)
            _add_block_counts(blocks, pool.info.name, pool.stats)
        yield from (roles, blocks, attempts)
        errors = GaugeMetricFamily(
            "baton_prediction_error_ratio",
            "Mean relative error of recent predictions",
            labels=["quantity"],
        )
        for quantity, error in state.prediction_errors.items():
            errors.add_metric([quantity], error)
        yield errors
        yield GaugeMetricFamily(
            "baton_prefix_directory_blocks",
            "Distinct blocks in the prefix directory",
            len(state.prefix_directory),
        )

    def _device_gauges(self) -> Iterator[Metric]:
        """What nodes compute on. Gauges whose value a node does not know have no series of it."""
        info = GaugeMetricFamily(
            "baton_device_info",
            "1 for the device that a node computes on",
            labels=["node", "device", "name", "threads"],
        )
        gauges = [
            GaugeMetricFamily(f"baton_{name}", help_text, labels=["node"])
            for name, help_text in (
                ("device_memory_bytes", "Memory of a node's device"),
                ("device_memory_used_bytes", "Of it, in use by all processes"),
                ("mfu", "Model FLOPs utilisation of a node's recent steps"),
                ("mbu", "Model bandwidth utilisation of a node's recent steps"),
            )
        ]
        weights = GaugeMetricFamily(
            "baton_packed_weight_bytes",
            "Weights of a node in the layout of the native CPU kernels, by where it found them",
            labels=["node", "source"],
        )
        for node in self._brain.node_registry.nodes.values():
            report = node.stats.device if node.stats is not None else None
            if report is None:
                continue
            if report.packed_weight_bytes:
                labels = [node.info.name, report.packed_weight_source]
                weights.add_metric(labels, report.packed_weight_bytes)
            info.add_metric([node.info.name, report.device, report.name, str(report.threads)], 1)
            memory = report.memory_total_bytes, report.memory_used_bytes
            sizes = memory if report.memory_total_bytes else (None, None)
            for gauge, value in zip(gauges, (*sizes, report.mfu, report.mbu), strict=True):
                if value is not None:
                    gauge.add_metric([node.info.name], value)
        yield from (info, *gauges, weights)

    def _retry_gauges(self) -> Iterator[Metric]:
        brain, retries = self._brain, self._brain.retries
        yield GaugeMetricFamily(
            "baton_local_prefill_only",
            "1 while decode nodes compute every prompt although the mode provides for hand-offs",
            float(brain.is_local_prefill_only),
        )
        breakers = GaugeMetricFamily(
            "baton_breakers", "Circuit breakers of node pairs, by state", labels=["state"]
        )
        for state in (BreakerState.OPEN, BreakerState.HALF_OPEN):
            breakers.add_metric([state.value], brain.breakers.count_in_state(state))
        yield breakers
        yield GaugeMetricFamily(
            "baton_retry_budget",
            "Retries that may be made now",
            retries.budget.available_retries(self._clock()),
        )
        yield GaugeMetricFamily(
            "baton_retries_waiting",
            "Requests that wait for the retry budget",
            retries.held_back_count,
        )

    def _ratio_gauges(self) -> Iterator[Metric]:
        controller = self._brain.ratio_controller
        target = self._brain.role_switcher.target_split
        target_nodes = GaugeMetricFamily(
            "baton_ratio_target", "Target number of nodes of a role", labels=["role"]
        )
        if target is not None:
            for role in Role:
                target_nodes.add_metric([role.value], target.node_count(role))
        yield target_nodes
        goodput = GaugeMetricFamily(
            "baton_goodput_ratio",
            "Share of the requests that ended in the last minute that met the SLO",
        )
        attainment = controller.get_slo_results(self._clock()).attainment
        if attainment is not None:
            goodput.add_metric([], attainment)
        yield goodput
        yield GaugeMetricFamily(
            "baton_ratio_auto", "1 while the ratio is automatic", int(controller.is_automatic)
        )

    def _node_metrics(self, taken: set[str]) -> Iterator[Metric]:
        """The nodes' own counters, with the node as a label.

        One whose name is in `taken` (names of the coordinator's metrics), or does not begin with
        baton_, gets the prefix baton_node_.
        """
        families: dict[str, Metric] = {}
        for node in self._brain.list_members():
            for name, labels, value in _parse_node_counters(node.stats):
                base = name.removesuffix("_total")
                if not name.startswith("baton_") or base in taken:
                    name = f"baton_node_{name.removeprefix('baton_')}"
                metric_type = "counter" if name.endswith("_total") else "gauge"
                family = families.setdefault(
                    name, Metric(name.removesuffix("_total"), "As counted by the node", metric_type)
                )
                family.add_sample(name, labels | {"node": node.info.name}, value)
        yield from families.values()


def _add_block_counts(blocks: GaugeMetricFamily, name: str, stats: NodeStats | None) -> None:
    if stats is not None:
        for state in _BLOCK_STATES:
            blocks.add_metric([name, state], getattr(stats, f"blocks_{state}"))


def _counter_family(
    name: str, help_text: str, labels: list[str], values: Mapping[Any, int]
) -> CounterMetricFamily:
    """A key of `values` is the tuple of label values, or the one label value."""
    family = CounterMetricFamily(name, help_text, labels=labels)
    for key, value in values.items():
        family.add_metric([key] if isinstance(key, str) else list(key), value)
    return family


def _add_zero_series(counters: Sequence[CounterMetricFamily], classes: Sequence[str]) -> None:
    """Add the known series that have not been counted yet, with the value 0."""
    known = list_known_labels(classes)
    for family in counters:
        counted = {tuple(sample.labels.values()) for sample in family.samples}
        for labels in known.get(f"{family.name}_total", ()):
            if labels not in counted:
                family.add_metric(labels, 0)


def _parse_node_counters(stats: NodeStats | None) -> Iterable[tuple[str, dict[str, str], float]]:
    """Parse `name` and `name{key="value",...}`, skipping malformed keys."""
    for number, (text, value) in enumerate(sorted(stats.counters.items()) if stats else ()):
        match = _COUNTER_KEY.fullmatch(text)
        if match is None or number >= MAX_NODE_COUNTERS:
            continue
        yield match["name"], dict(_LABEL.findall(match["labels"] or "")), value
