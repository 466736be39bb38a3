"""How long an answer will be, before it is: from `max_tokens`, and from the share of it that answers took before.

The share is kept for each tenant and each power of two of `max_tokens`, as an
exponentially weighted mean, because those who ask for 16 tokens tend to take them all and those who allow 4,096 do not.
"""

from collections import OrderedDict
from dataclasses import dataclass

from baton.mean_error import MEMORY, MeanError

PRIOR_SHARE = 0.5
MAX_KEPT = 4096  # pairs of tenant and power, the last used first


@dataclass(slots=True)
class _Share:
    mean: float = PRIOR_SHARE
    seen: int = 0

    def add(self, share: float) -> None:
        self.seen += 1
        self.mean += (share - self.mean) / min(self.seen + 1, MEMORY)  # the prior is one of them


class OutputLengths:
    def __init__(self) -> None:
        self.error = MeanError()
        self._shares: OrderedDict[tuple[str, int], _Share] = OrderedDict()

    def expect(self, who: str, max_tokens: int) -> float:
        """Tokens, from 1 to `max_tokens`."""
        known = self._shares.get((who, max_tokens.bit_length()))
        return max(1.0, (known.mean if known else PRIOR_SHARE) * max_tokens)

    def took(self, who: str, max_tokens: int, tokens: int) -> None:
        """An answer that ended well."""
        self.error.add(self.expect(who, max_tokens), tokens)
        kind = (who, max_tokens.bit_length())
        self._shares.setdefault(kind, _Share()).add(tokens / max_tokens)
        self._shares.move_to_end(kind)
        if len(self._shares) > MAX_KEPT:
            self._shares.popitem(last=False)
