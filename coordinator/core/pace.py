"""How fast requests have lately been served once they were placed: the fastest, which no deadline can be expected to
beat, and the usual, by which it is judged who is worth a place that others wait for."""

from baton.errors import DeadlineExceeded

_FADE = 1.02  # how much slower the record gets with each request that does not beat it
_LEAST_TOKENS = 64  # of a prompt, for its time to say more about the machine than about the message
_MARGIN = 0.5  # of the fastest: who is near the edge is given the chance
_SHARE = 0.1  # of the newest request in what is usual


class Pace:
    """Answers are told apart by the power of two of the tokens that they might have: who asks for 16 tends to take them
    all, who allows 4,096 does not."""

    def __init__(self) -> None:
        self._fastest: float | None = None  # seconds for a token of the prompt
        self._prompt: float | None = None  # the same, usually
        self._answer: dict[int, float] = {}  # seconds after the first token, for each token allowed

    def served(self, tokens: int, seconds: float) -> None:
        """A prompt of so many tokens took so long from placing to its first token."""
        if tokens >= _LEAST_TOKENS and seconds > 0:
            worse = self._fastest * _FADE if self._fastest is not None else seconds / tokens
            self._fastest = min(seconds / tokens, worse)
        self._prompt = _mean(self._prompt, seconds / max(tokens, _LEAST_TOKENS))

    def answered(self, allowed: int, seconds: float) -> None:
        """An answer that might have had `allowed` tokens ended well so long after its first one."""
        kind = allowed.bit_length()
        self._answer[kind] = _mean(self._answer.get(kind), seconds / allowed)

    def usual_prompt(self, tokens: int) -> float:
        """Seconds from placing to the first token; 0 while nothing is known."""
        return (self._prompt or 0.0) * max(tokens, _LEAST_TOKENS)

    def usual(self, tokens: int, allowed: int) -> float:
        """Seconds from placing to the end, likewise."""
        return self.usual_prompt(tokens) + self._answer.get(allowed.bit_length(), 0.0) * allowed

    def too_late(self, tokens: int, allowed: int, left: float, *, wanted: bool) -> DeadlineExceeded | None:
        """Why a request that was not placed yet cannot be served in the seconds that are left to its deadline, if so.
        `wanted`: others wait for its place, who would be served in time."""
        least = _MARGIN * tokens * (self._fastest or 0.0)
        if wanted:
            least = max(least, self.usual(tokens, allowed))
        if least < left:
            return None
        return DeadlineExceeded(
            f"{left:.3g} s are left to the deadline of {tokens} tokens of prompt and up to {allowed} of answer, which"
            f" take about {least:.3g} s"
        )


def _mean(known: float | None, new: float) -> float:
    return new if known is None else known + _SHARE * (new - known)
