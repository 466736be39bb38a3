"""What a request that comes now may expect of the nodes, by the cost model and the books: asked before anything is
spent on it."""

import math

from baton.errors import DeadlineExceeded
from baton.types import Role
from coordinator.core.answer_time import AnswerTimes
from coordinator.core.cost_model import CostModel
from coordinator.core.loads import Loads
from coordinator.core.registry import Registry

_MARGIN = 0.5  # of the fastest prediction: who is near the edge is given the chance


class Prospects:
    def __init__(self, registry: Registry, loads: Loads, costs: CostModel, answers: AnswerTimes) -> None:
        self._registry = registry
        self._answers = answers
        self._loads = loads
        self._costs = costs

    def computing(self, tokens: int) -> float:
        """Seconds that a prompt of so many tokens takes by itself, none of it cached."""
        return self._costs.fleet.prefill(tokens, 0)

    def answering(self, tenant: str, max_tokens: int) -> float:
        """Seconds that a placed request is expected to take beside computing its prompt."""
        return self._answers.expect(tenant, max_tokens)

    def node_wait(self, now: float) -> float:
        """Seconds until the first of the nodes that compute prompts will have computed what it holds."""
        role = Role.PREFILL if self._registry.serves(Role.PREFILL) else Role.DECODE
        least = math.inf
        for node in self._registry.in_service(role):
            least = min(least, self._loads.view(node).wait(now))
            if least == 0.0:
                break
        return least if least < math.inf else 0.0

    def decode_full(self, blocks: int = 0) -> bool:
        """Does every decode node serve as many as it can, or have no room for so many blocks more?"""
        decode = (self._loads.view(node) for node in self._registry.in_service(Role.DECODE))
        return all(view.attempts >= view.max_num_seqs or view.room < blocks for view in decode)

    def too_late(self, tokens: int, held: int, left: float) -> DeadlineExceeded | None:
        """Why a context that was not placed yet, of which a cache seems to have `held`, cannot be computed in the
        seconds that are left to its deadline, if so."""
        if self._costs.can_prefill_within(tokens - held, held, left / _MARGIN):
            return None
        least = _MARGIN * self._costs.least_prefill(tokens - held, held)
        return DeadlineExceeded(
            f"a prompt of {tokens} tokens takes {least:.3g} s at least: {max(left, 0.0):.3g} s are left for it"
        )
