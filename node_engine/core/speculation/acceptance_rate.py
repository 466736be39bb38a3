"""How likely a draft token is the one that is drawn, learned from the drafts of a sequence."""

PRIOR_TRIALS = 2.0  # the prior counts as so many
DECAY_TRIALS = 32.0  # a trial counts for so many further ones
INITIAL_RATE = 0.7  # of a node without any experience


class AcceptanceRate:
    """The decayed share of draft tokens that were right, of those whose predecessors were.

    Drafts count whether they were verified or not: a token that is drawn without a draft says as
    well whether the proposal was right. So a low rate, which keeps drafts from being verified, is
    corrected as soon as proposals are right again.
    """

    def __init__(self, prior: float = INITIAL_RATE) -> None:
        self._right = prior * PRIOR_TRIALS
        self._trials = PRIOR_TRIALS

    @property
    def rate(self) -> float:
        """Estimated probability, 0 to 1."""
        return self._right / self._trials

    def add_trials(self, num_right: int, *, is_wrong: bool) -> None:
        """Learn from a draft: its first `num_right` tokens were right, and a wrong one followed."""
        for _ in range(num_right):
            self._add_trial(1.0)
        if is_wrong:
            self._add_trial(0.0)

    def _add_trial(self, right: float) -> None:
        keep = 1.0 - 1.0 / DECAY_TRIALS
        self._right = keep * self._right + right
        self._trials = keep * self._trials + 1.0
