"""What penalties count: the distinct tokens of a sequence, and how often each is in its output."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from baton.types import SamplingParams

_FIRST_ROOM = 64  # for tokens that the prompt does not have


def penalizes(params: SamplingParams) -> bool:
    """Whether any penalty is on: whoever has none pays for no counting."""
    return bool(params.presence_penalty or params.frequency_penalty) or params.repetition_penalty != 1.0


class TokenCounts:
    """Distinct tokens, those of the prompt ascending and then each as it first appears in the output. Counting a token
    is amortised O(1); nothing is ever counted again."""

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        distinct = np.unique(np.asarray(prompt, np.int64))
        self.num_output = 0
        self._used = len(distinct)
        self._ids = np.concatenate((distinct, np.zeros(_FIRST_ROOM, np.int64)))
        self._counts = np.zeros(len(self._ids), np.float32)
        self._places = {token: place for place, token in enumerate(distinct.tolist())}

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Distinct token ids, [n]. A view: valid until the next `add`."""
        return self._ids[: self._used]

    @property
    def in_output(self) -> npt.NDArray[np.float32]:
        """How often each of `ids` is in the output, [n]; 0 for those of the prompt alone."""
        return self._counts[: self._used]

    def add(self, output: Iterable[int]) -> None:
        """Count more tokens of output."""
        for token in output:
            place = self._places.setdefault(token, self._used)
            if place == self._used:
                if place == len(self._ids):
                    self._ids, self._counts = np.resize(self._ids, 2 * place), np.resize(self._counts, 2 * place)
                self._ids[place], self._counts[place] = token, 0
                self._used += 1
            self._counts[place] += 1
            self.num_output += 1
