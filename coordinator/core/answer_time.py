"""What a placed request takes beside computing its prompt, by what requests lately took: the delay before the first
token (waiting on the node, the hand-off), and after it as many tokens as are expected, each as long as a token has
taken from the first to the last of an answer, preemptions and crowded steps included."""

from coordinator.core.output_length import OutputLengths

_SHARE = 0.1  # of the newest request in what is usual


class AnswerTimes:
    def __init__(self, lengths: OutputLengths) -> None:
        self._lengths = lengths
        self._delay: float | None = None  # seconds
        self._token: float | None = None

    def expect(self, who: str, max_tokens: int) -> float:
        """Seconds; 0 while nothing is known."""
        more = self._lengths.expect(who, max_tokens) - 1 if max_tokens else 0.0
        return (self._delay or 0.0) + more * (self._token or 0.0)

    def began(self, delay: float) -> None:
        """A first token came so many seconds later than computing alone would have let it."""
        self._delay = _usual(self._delay, max(0.0, delay))

    def took(self, tokens: int, seconds: float) -> None:
        """An answer that ended well, `seconds` after its first token."""
        if tokens > 1:
            self._token = _usual(self._token, seconds / (tokens - 1))


def _usual(known: float | None, new: float) -> float:
    return new if known is None else known + _SHARE * (new - known)
