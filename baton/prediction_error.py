"""The recent mean error of predictions."""

DECAY_OBSERVATIONS = 64.0  # observations after which the weight of one has decayed to 1/e


class MeanRelativeError:
    """Exponentially weighted mean of |predicted - observed| / max(predicted, observed)."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add_prediction(self, predicted: float, observed: float) -> float:
        """Add a prediction with what was observed. Returns its error, between 0 and 1."""
        greater = max(predicted, observed)
        error = abs(predicted - observed) / greater if greater > 0.0 else 0.0
        self.count += 1
        self.value += (error - self.value) / min(self.count, DECAY_OBSERVATIONS)
        return error
