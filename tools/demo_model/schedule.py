"""Warm-up, a plateau, then a linear decay to nothing ("WSD", Hu et al. 2024)."""

WARM_UP = 0.02
DECAY = 0.40


def rate(done: float) -> float:
    """Factor of the peak learning rate, for `done` from 0 to 1."""
    if done < WARM_UP:
        return max(done / WARM_UP, 0.01)
    return max(0.0, min(1.0, (1.0 - done) / DECAY))
