"""Learning rate: warm-up, a plateau, then a linear decay to 0 ("WSD", Hu et al. 2024)."""

WARM_UP_SHARE = 0.02
DECAY_SHARE = 0.40


def learning_rate_factor(done: float) -> float:
    """Return the factor of the peak learning rate, for `done` from 0 to 1."""
    if done < WARM_UP_SHARE:
        return max(done / WARM_UP_SHARE, 0.01)
    return max(0.0, min(1.0, (1.0 - done) / DECAY_SHARE))
