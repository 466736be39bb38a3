"""What drafting with a model takes, learned from the steps of the draft model.

    seconds = a steps + b tokens

Until the first draft it is assumed to cost nothing, so that a node tries it.
"""

from baton.online_fit import OnlineLinearFit

_PRIOR = (4e-9, 1e-9)  # a step costs as much as a few tokens; the first observation scales it


class DraftingCost:
    """A cost model of drafts of one model."""

    def __init__(self) -> None:
        self._fit = OnlineLinearFit(_PRIOR)

    def predict_seconds(self, num_steps: int, num_tokens: int) -> float:
        """Of `num_steps` draft tokens in a row, `num_tokens` over all sequences."""
        return self._fit.predict((float(num_steps), float(num_tokens)))

    def forget(self) -> None:
        """Learn from the next draft as from the first one. Until then, predictions stay."""
        self._fit.reset()

    def observe_drafts(self, num_steps: int, num_tokens: int, seconds: float) -> None:
        self._fit.add_observation((float(num_steps), float(num_tokens)), seconds)
