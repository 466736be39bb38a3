"""How far predictions are off, of late."""

DECAY_OBSERVATIONS = 64.0  # predictions after which one counts 1/e


class MeanRelativeError:
    """The mean of |predicted - seen| / the greater of the two, between 0 and 1, exponentially
    weighted."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add_prediction(self, predicted: float, seen: float) -> float:
        """The error of this one."""
        greater = max(predicted, seen)
        error = abs(predicted - seen) / greater if greater > 0.0 else 0.0
        self.count += 1
        self.value += (error - self.value) / min(self.count, DECAY_OBSERVATIONS)
        return error
