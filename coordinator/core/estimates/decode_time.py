"""Predicts the time that a placed request takes besides computing its prompt.

That is the delay before the first token (waiting on the node, hand-off) plus the expected number of
tokens, each at the recent mean from the first to the last token of an output, which includes
preemptions and large batches.
"""

from coordinator.core.estimates.output_length import OutputLengthPredictor

_NEWEST_WEIGHT = 0.1  # of the newest request in the moving average


class DecodeTimePredictor:
    def __init__(self, lengths: OutputLengthPredictor) -> None:
        self._lengths = lengths
        self._first_token_delay: float | None = None  # seconds
        self._token_seconds: float | None = None

    def predict_seconds(self, who: str, max_tokens: int) -> float:
        """Return the predicted seconds; 0 while nothing is known."""
        more = self._lengths.predict_tokens(who, max_tokens) - 1 if max_tokens else 0.0
        return (self._first_token_delay or 0.0) + more * (self._token_seconds or 0.0)

    def record_first_token_delay(self, delay: float) -> None:
        """Record how much later than computing alone a first token came."""
        self._first_token_delay = _moving_average(self._first_token_delay, max(0.0, delay))

    def record_answer(self, tokens: int, seconds: float) -> None:
        """Record an output that was complete `seconds` after its first token."""
        if tokens > 1:
            self._token_seconds = _moving_average(self._token_seconds, seconds / (tokens - 1))


def _moving_average(known: float | None, new: float) -> float:
    return new if known is None else known + _NEWEST_WEIGHT * (new - known)
