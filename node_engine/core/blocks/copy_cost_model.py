"""Decides whether copying a partly matching pool block is faster than computing its tokens."""

_NEWEST_STEP_WEIGHT = 0.1  # of the newest step in the moving average


class CopyCostModel:
    """Compares the time to copy one block with the time to compute tokens on this machine.

    Until a prompt has been computed, every copy counts as worthwhile.
    """

    def __init__(self, copy_seconds: float) -> None:
        self._copy_seconds = copy_seconds  # to copy one block
        self.seconds_per_token: float | None = None  # of prompts; None until one was computed

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Record that a prefill step computed `tokens` tokens in `seconds`."""
        newest, mean = seconds / tokens, self.seconds_per_token
        self.seconds_per_token = (
            newest if mean is None else mean + _NEWEST_STEP_WEIGHT * (newest - mean)
        )

    def is_copy_worthwhile(self, tokens: int) -> bool:
        """Whether copying a block is faster than computing the `tokens` tokens that it holds."""
        return (
            self.seconds_per_token is None or tokens * self.seconds_per_token > self._copy_seconds
        )
