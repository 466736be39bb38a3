"""Estimates the latency that a new request can expect, from the cost model and the books."""

import math

from baton.errors import DeadlineExceeded
from baton.types import Role
from coordinator.core.estimates.cost_model import CostModel
from coordinator.core.estimates.decode_time import DecodeTimePredictor
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.placement.node_loads import NodeLoads

_OPTIMISM = 0.5  # of the fastest prediction, so that borderline requests get their chance


class LatencyEstimator:
    def __init__(
        self,
        registry: NodeRegistry,
        loads: NodeLoads,
        costs: CostModel,
        answers: DecodeTimePredictor,
    ) -> None:
        self._registry = registry
        self._decode_times = answers
        self._loads = loads
        self._costs = costs

    def prefill_seconds(self, tokens: int) -> float:
        """Return the seconds to compute a prompt with no cached tokens on an idle node."""
        return self._costs.fleet_costs.prefill_seconds(tokens, 0)

    def decode_seconds(self, tenant: str, max_tokens: int) -> float:
        """Return the seconds that a placed request takes besides computing its prompt."""
        return self._decode_times.predict_seconds(tenant, max_tokens)

    def node_wait_seconds(self, now: float) -> float:
        """Return the seconds until the first node that computes prompts has no prompt left."""
        role = Role.PREFILL if self._registry.has_serving_node(Role.PREFILL) else Role.DECODE
        least = math.inf
        for node in self._registry.nodes_in_service(role):
            least = min(least, self._loads.get_view(node).queue_wait_seconds(now))
            if least == 0.0:
                break
        return least if least < math.inf else 0.0

    def is_decode_full(self, blocks: int = 0) -> bool:
        """Return whether every decode node is out of slots, or of room for so many more blocks."""
        decode = (
            self._loads.get_view(node) for node in self._registry.nodes_in_service(Role.DECODE)
        )
        return all(
            view.attempts >= view.max_num_seqs or view.free_blocks < blocks for view in decode
        )

    def find_deadline_error(self, tokens: int, held: int, left: float) -> DeadlineExceeded | None:
        """Return the error if the context cannot be computed in the seconds that are left; `held`
        of its tokens seem to be cached."""
        if self._costs.can_prefill_within(tokens - held, held, left / _OPTIMISM):
            return None
        least = _OPTIMISM * self._costs.fastest_prefill_seconds(tokens - held, held)
        return DeadlineExceeded(
            f"a prompt of {tokens} tokens takes {least:.3g} s at least: {max(left, 0.0):.3g} s"
            " are left for it"
        )
