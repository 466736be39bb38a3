"""What a step that verifies drafts takes, learned from the steps of this node.

    seconds = a + b sequences + c context + d drafts

Until the first such step, a draft is assumed to cost what a token of a prompt does beside others,
which is the least that it can. So a node tries drafts before it knows their cost, and soon stops
where they are dear.
"""

from typing import Protocol

from baton.online_fit import OnlineLinearFit
from node_engine.core.step.step_batch import StepBatch

_KILO = 1 / 1024


class StepCostModel(Protocol):
    """What is known of steps without drafts."""

    @property
    def decode_coefficients(self) -> tuple[float, float, float]:
        """Seconds of a decode step: constant, per sequence, per 1024 context tokens."""
        ...

    @property
    def prompt_token_seconds(self) -> float:
        """Seconds that a token of a prompt adds to a step."""
        ...


class VerificationCost:
    """A cost model of steps with drafts and without prompts."""

    def __init__(self, step_costs: StepCostModel) -> None:
        self._step_costs = step_costs
        self._fit: OnlineLinearFit | None = None  # from the first observation on

    def predict_seconds(self, num_sequences: int, context_tokens: int, num_drafts: int) -> float:
        fit = self._fit or self._make_fit()
        return fit.predict(_list_features(num_sequences, context_tokens, num_drafts))

    def forget(self) -> None:
        """Expect of the next step with drafts what was expected of the first one."""
        self._fit = None

    def observe_step(self, batch: StepBatch, seconds: float) -> None:
        """Learn from a step that verified drafts."""
        if self._fit is None:
            self._fit = self._make_fit()
        context_tokens = sum(slice_.start + 1 for slice_ in batch.slices)
        self._fit.add_observation(
            _list_features(len(batch.slices), context_tokens, batch.num_draft_tokens), seconds
        )

    def _make_fit(self) -> OnlineLinearFit:
        costs = self._step_costs
        return OnlineLinearFit((*costs.decode_coefficients, costs.prompt_token_seconds))


def _list_features(
    num_sequences: int, context_tokens: int, num_drafts: int
) -> tuple[float, float, float, float]:
    return 1.0, float(num_sequences), context_tokens * _KILO, float(num_drafts)
