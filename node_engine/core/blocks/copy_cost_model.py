"""Whether a partly matching block of the pool is worth its copy: by what copying and computing take
on this machine."""

_NEWEST_STEP_WEIGHT = 0.1  # of the newest step


class CopyCostModel:
    """`copy_seconds`: what copying one block takes. Until a prompt has been computed every copy is
    worth it."""

    def __init__(self, copy_seconds: float) -> None:
        self._copy_seconds = copy_seconds
        self.seconds_per_token: float | None = None  # of prompts; None until one has been computed

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """A step of prompts took so long for so many tokens."""
        newest, mean = seconds / tokens, self.seconds_per_token
        self.seconds_per_token = (
            newest if mean is None else mean + _NEWEST_STEP_WEIGHT * (newest - mean)
        )

    def is_copy_worthwhile(self, tokens: int) -> bool:
        """Whether a copy that saves computing so many tokens is quicker than computing them."""
        return (
            self.seconds_per_token is None or tokens * self.seconds_per_token > self._copy_seconds
        )
