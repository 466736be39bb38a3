"""The fastest that prompts have lately been served: what no deadline can be expected to beat."""

from baton.errors import DeadlineExceeded

_FADE = 1.02  # how much slower the record gets with each request that does not beat it
_LEAST_TOKENS = 64  # of a prompt, for its time to say more about the machine than about the message
_MARGIN = 0.5  # of the fastest: who is near the edge is given the chance


class Pace:
    def __init__(self) -> None:
        self._per_token: float | None = None  # seconds

    def served(self, tokens: int, seconds: float) -> None:
        """A prompt of so many tokens took so long from placing to its first token."""
        if tokens >= _LEAST_TOKENS and seconds > 0:
            worse = self._per_token * _FADE if self._per_token is not None else seconds / tokens
            self._per_token = min(seconds / tokens, worse)

    def too_late(self, tokens: int, left: float) -> DeadlineExceeded | None:
        """Why a prompt that was not placed yet cannot be served in the seconds that are left to its deadline, if so."""
        least = _MARGIN * tokens * (self._per_token or 0.0)
        if least < left:
            return None
        return DeadlineExceeded(
            f"{left:.3g} s are left to the deadline of a prompt of {tokens} tokens, which takes {least:.3g} s at least"
        )
