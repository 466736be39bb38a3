"""One step of a node as plain data: what the scheduler decides and what an engine returns.

```
tokens   0          start            start+len(tokens)
         |-- in KV --|-- this slice --|-- later slices --|
blocks   [block_table .............................. ]
```

Input of the penalties: the distinct tokens of a sequence and their counts in its output.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, NewType

import numpy as np
import numpy.typing as npt

from baton.types import BlockIndex, SamplingParams, TokenLogprobs

_INITIAL_CAPACITY = 64  # for output tokens that are not in the prompt


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


SequenceId = NewType("SequenceId", int)  # process-local, never reused


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How to sample the token that follows a slice.

    The noise is a function of `params.seed`, `choice_index` and `position` alone.
    """

    params: SamplingParams
    choice_index: int
    position: int  # absolute index of the token in prompt + output
    forbidden_token_ids: tuple[int, ...] = ()  # may not be sampled (EOS before min_tokens)
    token_counts: TokenCounts | None = None  # input of the penalties; None without penalties
    may_continue: bool = True  # False if its bounds end the sequence with this token


@dataclass(frozen=True, slots=True)
class PromptLogprobsSpec:
    """Compute the logprobs of prompt tokens."""

    target_token_ids: tuple[int, ...]  # entry i follows the i-th token of the slice
    top_logprobs: int  # number of most likely tokens to report for each position


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """The tokens of one sequence that a step computes."""

    sequence_id: SequenceId
    token_ids: tuple[int, ...]
    start: int  # position of the first of `token_ids`
    block_table: Sequence[BlockIndex]  # covers at least positions 0 .. start + len(token_ids)
    sample_spec: SampleSpec | None  # sample the next token from the logits of the last one
    logprobs_spec: PromptLogprobsSpec | None = None


class SliceResult(NamedTuple):
    """What a step computed for one slice."""

    token_id: int | None = None  # the sampled token; None without `sample_spec`
    logprobs: TokenLogprobs | None = None  # of `token_id`, if its sampling parameters ask for them
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of `target_token_ids`
    is_deferred: bool = False  # nothing was computed: the slice belongs to the next step again


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The slices of one step: decode slices (one token, sampled) and prefill chunks mixed."""

    slices: tuple[SequenceSlice, ...]
    # Copies of whole blocks (source, destination) to make before the forward pass: copy on write.
    block_copies: tuple[tuple[BlockIndex, BlockIndex], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(slice_.token_ids) for slice_ in self.slices)

    def without_deferred(self, results: Sequence[SliceResult]) -> "StepBatch":
        """What was computed of the step, by its results."""
        if not any(result.is_deferred for result in results):
            return self
        computed = zip(self.slices, results, strict=True)
        return replace(self, slices=tuple(s for s, result in computed if not result.is_deferred))
