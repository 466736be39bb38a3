"""A linear cost learned online: seconds = coefficients . features, with no coefficient below zero.

Exponentially weighted least squares of the *relative* error, solved by cyclic coordinate descent on
the non-negative orthant (Franc, Hlavac, Navara, "Sequential coordinate-wise algorithm for the
non-negative least squares problem",
2005), which costs O(features**2) for each of a fixed number of sweeps. An observation weighs
1 / max(seen, predicted)**2, so that long prompts do not drown short ones; one that is further off
than usual weighs less in proportion (Huber's weights), so that a step that a page fault made slow
moves little. The prior counts as `PRIOR_WEIGHT` observations that fade like all others; the first
observation scales it, since a prior knows the shape of a cost and not the machine.
"""

import math
from collections.abc import Sequence

from baton.prediction_error import DECAY_OBSERVATIONS, MeanRelativeError

PRIOR_WEIGHT = 2.0  # observations
MIN_OBSERVED_SECONDS, MAX_OBSERVED_SECONDS = (
    1e-9,
    3600.0,
)  # seconds: what is not between them is no observation
_SWEEPS = 8
_HUBER_ERRORS = 3.0  # an error of so many times the usual one is still believed in full


class OnlineLinearFit:
    def __init__(self, prior: Sequence[float]) -> None:
        self.coefficients = tuple(prior)
        self.mean_error = MeanRelativeError()
        self._gram = [[0.0] * len(prior) for _ in prior]
        self._moment = [0.0] * len(prior)
        self._usual_error = 1.0  # relative error

    def predict(self, features: Sequence[float]) -> float:
        return sum(map(float.__mul__, self.coefficients, features))

    def add_observation(self, features: Sequence[float], seconds: float) -> float | None:
        """Learn from one observation; None, and nothing learned, if it is none. Returns the
        relative error that the prediction had, between 0 and 1: the difference as a share of the
        greater of the two."""
        if not (math.isfinite(seconds) and MIN_OBSERVED_SECONDS <= seconds < MAX_OBSERVED_SECONDS):
            return None
        predicted = max(self.predict(features), MIN_OBSERVED_SECONDS)
        error = self.mean_error.add_prediction(predicted, seconds)
        if self.mean_error.count == 1:
            self._scale_prior(features, seconds, seconds / predicted)
            predicted = seconds
        weight = min(1.0, _HUBER_ERRORS * self._usual_error / error) if error > 0.0 else 1.0
        self._usual_error += (error - self._usual_error) / DECAY_OBSERVATIONS
        self._accumulate(features, seconds, weight / max(seconds, predicted) ** 2)
        self._solve()
        return error

    def reset(self) -> None:
        """Forget what was learned. The next observation scales the coefficients as the first one
        did."""
        self.mean_error = MeanRelativeError()
        self._gram = [[0.0] * len(self.coefficients) for _ in self.coefficients]
        self._moment = [0.0] * len(self.coefficients)
        self._usual_error = 1.0

    def _scale_prior(self, features: Sequence[float], seconds: float, scale: float) -> None:
        """A coefficient's prior is as wide as itself, or as a tenth of what was seen if that is
        more."""
        self.coefficients = tuple(coefficient * scale for coefficient in self.coefficients)
        for place, (coefficient, feature) in enumerate(
            zip(self.coefficients, features, strict=True)
        ):
            width = max(coefficient, 0.1 * seconds / max(feature, MIN_OBSERVED_SECONDS))
            self._gram[place][place] = PRIOR_WEIGHT / width**2
            self._moment[place] = PRIOR_WEIGHT / width**2 * coefficient

    def _accumulate(self, features: Sequence[float], seconds: float, weight: float) -> None:
        keep = 1.0 - max(
            1.0 / DECAY_OBSERVATIONS, self._usual_error / 8.0
        )  # a machine that has changed is learned anew within a few
        for row, one in enumerate(features):
            self._moment[row] = keep * self._moment[row] + weight * one * seconds
            line = self._gram[row]
            for column, other in enumerate(features):
                line[column] = keep * line[column] + weight * one * other

    def _solve(self) -> None:
        found = list(self.coefficients)
        for _ in range(_SWEEPS):
            for row, line in enumerate(self._gram):
                rest = (
                    self._moment[row]
                    - sum(map(float.__mul__, line, found))
                    + line[row] * found[row]
                )
                found[row] = max(0.0, rest / line[row]) if line[row] > 0.0 else found[row]
        self.coefficients = tuple(found)
