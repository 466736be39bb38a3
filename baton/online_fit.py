"""A linear cost model learned online: seconds = coefficients . features, coefficients >= 0.

It minimizes the exponentially weighted squares of the *relative* error, by cyclic coordinate
descent on the non-negative orthant (Franc, Hlavac, Navara, "Sequential coordinate-wise algorithm
for the non-negative least squares problem", 2005), which costs O(features**2) for each of a fixed
number of sweeps. An observation has the weight 1 / max(observed, predicted)**2, so that long
prompts do not outweigh short ones. An observation with an unusually large error has a smaller
weight in proportion (Huber's weights), so that a step slowed down by a page fault changes little.
The prior counts as `PRIOR_WEIGHT` observations, which decay like all others. The first observation
scales it, because a prior gives the shape of a cost and does not know the machine.
"""

import math
from collections.abc import Sequence

from baton.prediction_error import DECAY_OBSERVATIONS, MeanRelativeError

PRIOR_WEIGHT = 2.0  # observations
MIN_OBSERVED_SECONDS, MAX_OBSERVED_SECONDS = 1e-9, 3600.0  # others are ignored
_SWEEPS = 8
_HUBER_ERRORS = 3.0  # errors of up to so many times the usual one have full weight


class OnlineLinearFit:
    """Learns the coefficients from observations of (features, seconds)."""

    def __init__(self, prior: Sequence[float]) -> None:
        """`prior` are coefficients of the right proportions."""
        self.coefficients = tuple(prior)
        self.mean_error = MeanRelativeError()
        self._gram = [[0.0] * len(prior) for _ in prior]
        self._moment = [0.0] * len(prior)
        self._usual_error = 1.0  # relative error

    def predict(self, features: Sequence[float]) -> float:
        return sum(map(float.__mul__, self.coefficients, features))

    def add_observation(self, features: Sequence[float], seconds: float) -> float | None:
        """Learn from one observation. Returns the relative error of its prediction.

        That is the difference as a share of the greater value, between 0 and 1. Returns None and
        learns nothing if `seconds` is out of range.
        """
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
        """Forget all observations. The next one scales the coefficients like the first."""
        self.mean_error = MeanRelativeError()
        self._gram = [[0.0] * len(self.coefficients) for _ in self.coefficients]
        self._moment = [0.0] * len(self.coefficients)
        self._usual_error = 1.0

    def _scale_prior(self, features: Sequence[float], seconds: float, scale: float) -> None:
        """Scale the prior to the first observation.

        The standard deviation of a coefficient is its value, or the one that explains a tenth of
        the observed seconds if that is more.
        """
        self.coefficients = tuple(coefficient * scale for coefficient in self.coefficients)
        for place, (coefficient, feature) in enumerate(
            zip(self.coefficients, features, strict=True)
        ):
            width = max(coefficient, 0.1 * seconds / max(feature, MIN_OBSERVED_SECONDS))
            self._gram[place][place] = PRIOR_WEIGHT / width**2
            self._moment[place] = PRIOR_WEIGHT / width**2 * coefficient

    def _accumulate(self, features: Sequence[float], seconds: float, weight: float) -> None:
        # Large errors shorten the memory, so that a changed machine is learned in a few steps.
        decay = 1.0 - max(1.0 / DECAY_OBSERVATIONS, self._usual_error / 8.0)
        for row, feature in enumerate(features):
            self._moment[row] = decay * self._moment[row] + weight * feature * seconds
            gram_row = self._gram[row]
            for column, other in enumerate(features):
                gram_row[column] = decay * gram_row[column] + weight * feature * other

    def _solve(self) -> None:
        found = list(self.coefficients)
        for _ in range(_SWEEPS):
            for row, line in enumerate(self._gram):
                residual = (
                    self._moment[row]
                    - sum(map(float.__mul__, line, found))
                    + line[row] * found[row]
                )
                found[row] = max(0.0, residual / line[row]) if line[row] > 0.0 else found[row]
        self.coefficients = tuple(found)
