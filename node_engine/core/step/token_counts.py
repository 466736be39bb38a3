"""Input of the penalties: the distinct tokens of a sequence and their counts in its output."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from baton.types import SamplingParams

_INITIAL_CAPACITY = 64  # for output tokens that are not in the prompt


def has_penalties(params: SamplingParams) -> bool:
    """Whether `params` has any penalty; without one, tokens need not be counted."""
    return (
        bool(params.presence_penalty or params.frequency_penalty)
        or params.repetition_penalty != 1.0
    )


class TokenCounts:
    """Distinct tokens of a sequence: those of the prompt, then output tokens as they appear.

    Counting a token takes amortised O(1); no token is counted twice.
    """

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        distinct = np.unique(np.asarray(prompt, np.int64))
        self.num_output_tokens = 0
        self._num_distinct = len(distinct)
        self._ids = np.concatenate((distinct, np.zeros(_INITIAL_CAPACITY, np.int64)))
        self._counts = np.zeros(len(self._ids), np.float32)
        self._index_of_token = {token: place for place, token in enumerate(distinct.tolist())}

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """Distinct token ids, [n]. The view is valid until the next `add_output_tokens`."""
        return self._ids[: self._num_distinct]

    @property
    def output_counts(self) -> npt.NDArray[np.float32]:
        """Count of each of `token_ids` in the output, [n]; 0 for tokens of the prompt alone."""
        return self._counts[: self._num_distinct]

    def add_output_tokens(self, output: Iterable[int]) -> None:
        """Count more output tokens."""
        for token in output:
            place = self._index_of_token.setdefault(token, self._num_distinct)
            if place == self._num_distinct:
                if place == len(self._ids):
                    self._ids, self._counts = (
                        np.resize(self._ids, 2 * place),
                        np.resize(self._counts, 2 * place),
                    )
                self._ids[place], self._counts[place] = token, 0
                self._num_distinct += 1
            self._counts[place] += 1
            self.num_output_tokens += 1
