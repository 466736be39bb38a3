"""Everything that the coordinator has learned about its nodes and their work, for placement.

Placement reads the parts of `PlacementState`, which learn from the reports that it passes on.
"""

from baton.cluster_link.messages import DecodeStarted, PrefillEnded
from baton.cluster_link.report_types import HandoffReport, NodeStats
from baton.prediction_error import MeanRelativeError
from baton.types import Incarnation, Request
from coordinator.core.estimates.cost_model import CostModel, DecodeStepStats, DecodeTimePredictor
from coordinator.core.estimates.workload import OutputLengthPredictor, WorkloadMeter
from coordinator.core.membership.node_registry import NodeMember, NodeRegistry
from coordinator.core.membership.pool_registry import PoolRegistry
from coordinator.core.membership.prefix_directory import CachedPrefixes, PrefixDirectory
from coordinator.core.placement.interface import LatencyPrediction


class PlacementState:
    """The learned costs, output lengths and cached prefixes, and the reports they come from."""

    def __init__(self, registry: NodeRegistry) -> None:
        self.cost_model = CostModel()
        self.output_lengths = OutputLengthPredictor()
        self.decode_times = DecodeTimePredictor(self.output_lengths)
        self.prefix_directory = PrefixDirectory()
        self.pools = PoolRegistry(registry.silence_seconds)
        self.cached_prefixes = CachedPrefixes(registry, self.prefix_directory, self.pools)
        self.workload_meter = WorkloadMeter()
        self._registry = registry
        self._first_token_error = MeanRelativeError()

    @property
    def prediction_errors(self) -> dict[str, float]:
        """Mean relative errors of predictions, by what was predicted."""
        others = {
            "first_token": self._first_token_error,
            "output_tokens": self.output_lengths.relative_error,
        }
        return self.cost_model.relative_errors | {
            name: error.value for name, error in others.items() if error.count
        }

    def add_node(self, node: NodeMember) -> None:
        self.prefix_directory.add_node(node.incarnation, node.info.num_blocks)
        self.cost_model.node_count = len(self._registry.nodes)

    def remove_node(self, node: Incarnation) -> None:
        self.prefix_directory.remove_node(node)
        self.cost_model.node_count = len(self._registry.nodes)

    # outcomes of requests

    def record_answer(self, request: Request, tokens: int, seconds: float) -> None:
        """Learn from an output that was complete `seconds` after its first token."""
        self.decode_times.record_answer(tokens, seconds)
        self.output_lengths.record_output(
            request.principal.tenant, request.sampling.max_tokens, tokens
        )

    def record_first_token(self, prediction: LatencyPrediction, seconds: float) -> None:
        """Learn from a first token that came `seconds` after its placement."""
        self.decode_times.record_first_token_delay(seconds - prediction.prefill_seconds)
        self._first_token_error.add_prediction(prediction.ttft_seconds, seconds)

    # reports of nodes

    def record_decode_steps(
        self, node: NodeMember, before: NodeStats | None, after: NodeStats, now: float
    ) -> None:
        """Learn from the decode steps between two heartbeats, or before the first."""
        before = before or NodeStats()
        count = after.decode_steps - before.decode_steps
        if count <= 0:
            return
        seen = DecodeStepStats(
            step_seconds=(after.decode_step_seconds - before.decode_step_seconds) / count,
            batch_size=(after.decode_step_sequences - before.decode_step_sequences) / count,
            resident_tokens=(after.decode_step_tokens - before.decode_step_tokens) / count,
        )
        if seen.batch_size > 0 and seen.resident_tokens >= 0:
            self.cost_model.record_decode_steps(node.info.name, seen, now)

    def record_prefill(
        self, node: Incarnation | None, report: PrefillEnded | DecodeStarted, now: float
    ) -> None:
        """Learn from a prompt, or its uncached part, that a node computed."""
        new, cached = report.computed_tokens, report.cached_tokens
        found = self._registry.nodes.get(node) if node else None
        if new:  # else another node has computed it, and says so
            self.workload_meter.record_prefill(new, cached)
        if found is not None:
            self.cost_model.record_prefill(
                found.info.name, new, cached, report.compute_seconds, now
            )

    def record_handoff(
        self,
        writer: Incarnation | None,
        decode: Incarnation | None,
        report: HandoffReport,
        now: float,
    ) -> None:
        nodes = self._registry.nodes
        if writer in nodes and decode in nodes and report.bytes:
            seconds = report.exposed_seconds + report.commit_seconds
            names = nodes[writer].info.name, nodes[decode].info.name
            self.cost_model.record_transfer(*names, report.bytes, seconds, now)
