"""What a placed request takes beside computing its prompt, by what requests lately took: the delay
before the first token (waiting on the node, the hand-off), and after it as many tokens as are
expected, each as long as a token has taken from the first to the last of an answer, preemptions and
crowded steps included."""

from coordinator.core.estimates.output_length import OutputLengthPredictor

_NEWEST_WEIGHT = 0.1  # of the newest request in what is usual


class DecodeTimePredictor:
    def __init__(self, lengths: OutputLengthPredictor) -> None:
        self._lengths = lengths
        self._first_token_delay: float | None = None  # seconds
        self._token_seconds: float | None = None

    def predict_seconds(self, who: str, max_tokens: int) -> float:
        """Seconds; 0 while nothing is known."""
        more = self._lengths.predict_tokens(who, max_tokens) - 1 if max_tokens else 0.0
        return (self._first_token_delay or 0.0) + more * (self._token_seconds or 0.0)

    def record_first_token_delay(self, delay: float) -> None:
        """A first token came so many seconds later than computing alone would have let it."""
        self._first_token_delay = _moving_average(self._first_token_delay, max(0.0, delay))

    def record_answer(self, tokens: int, seconds: float) -> None:
        """An answer that ended well, `seconds` after its first token."""
        if tokens > 1:
            self._token_seconds = _moving_average(self._token_seconds, seconds / (tokens - 1))


def _moving_average(known: float | None, new: float) -> float:
    return new if known is None else known + _NEWEST_WEIGHT * (new - known)
