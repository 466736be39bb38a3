"""What a request that comes now may expect of the nodes, by the cost model and the books: asked
before anything is spent on it."""

import math

from baton.errors import DeadlineExceeded
from baton.types import Role
from coordinator.core.estimates.cost_model import CostModel
from coordinator.core.estimates.decode_time import DecodeTimePredictor
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.placement.node_loads import NodeLoads

_OPTIMISM = 0.5  # of the fastest prediction: who is near the edge is given the chance


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
        """Seconds that a prompt of so many tokens takes by itself, none of it cached."""
        return self._costs.fleet_costs.prefill_seconds(tokens, 0)

    def decode_seconds(self, tenant: str, max_tokens: int) -> float:
        """Seconds that a placed request is expected to take beside computing its prompt."""
        return self._decode_times.predict_seconds(tenant, max_tokens)

    def node_wait_seconds(self, now: float) -> float:
        """Seconds until the first of the nodes that compute prompts will have computed what it
        holds."""
        role = Role.PREFILL if self._registry.has_serving_node(Role.PREFILL) else Role.DECODE
        least = math.inf
        for node in self._registry.nodes_in_service(role):
            least = min(least, self._loads.get_view(node).queue_wait_seconds(now))
            if least == 0.0:
                break
        return least if least < math.inf else 0.0

    def is_decode_full(self, blocks: int = 0) -> bool:
        """Does every decode node serve as many as it can, or have no room for so many blocks
        more?"""
        decode = (
            self._loads.get_view(node) for node in self._registry.nodes_in_service(Role.DECODE)
        )
        return all(
            view.attempts >= view.max_num_seqs or view.free_blocks < blocks for view in decode
        )

    def find_deadline_error(self, tokens: int, held: int, left: float) -> DeadlineExceeded | None:
        """Why a context that was not placed yet, of which a cache seems to have `held`, cannot be
        computed in the seconds that are left to its deadline, if so."""
        if self._costs.can_prefill_within(tokens - held, held, left / _OPTIMISM):
            return None
        least = _OPTIMISM * self._costs.fastest_prefill_seconds(tokens - held, held)
        return DeadlineExceeded(
            f"a prompt of {tokens} tokens takes {least:.3g} s at least: {max(left, 0.0):.3g} s are left for it"
        )
