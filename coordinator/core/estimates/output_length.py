"""Predicts output lengths from `max_tokens` and the share of it that earlier outputs used.

The share is an exponentially weighted mean for each tenant and each power of two of `max_tokens`:
requests for 16 tokens tend to use them all, and those that allow 4,096 do not.
"""

from collections import OrderedDict
from dataclasses import dataclass

from baton.prediction_error import DECAY_OBSERVATIONS, MeanRelativeError

PRIOR_SHARE = 0.5
MAX_KEYS = 4096  # pairs of tenant and power, least recently used evicted


@dataclass(slots=True)
class _OutputShare:
    mean: float = PRIOR_SHARE
    sample_count: int = 0

    def add_sample(self, share: float) -> None:
        self.sample_count += 1
        self.mean += (share - self.mean) / min(
            self.sample_count + 1, DECAY_OBSERVATIONS
        )  # the prior is one of them


class OutputLengthPredictor:
    def __init__(self) -> None:
        self.relative_error = MeanRelativeError()
        self._shares: OrderedDict[tuple[str, int], _OutputShare] = OrderedDict()

    def predict_tokens(self, who: str, max_tokens: int) -> float:
        """Return the predicted tokens, from 1 to `max_tokens`."""
        known = self._shares.get((who, max_tokens.bit_length()))
        return max(1.0, (known.mean if known else PRIOR_SHARE) * max_tokens)

    def record_output(self, who: str, max_tokens: int, tokens: int) -> None:
        """Record a complete output."""
        self.relative_error.add_prediction(self.predict_tokens(who, max_tokens), tokens)
        kind = (who, max_tokens.bit_length())
        self._shares.setdefault(kind, _OutputShare()).add_sample(tokens / max_tokens)
        self._shares.move_to_end(kind)
        if len(self._shares) > MAX_KEYS:
            self._shares.popitem(last=False)
