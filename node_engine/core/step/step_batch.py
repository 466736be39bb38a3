"""One step of a node as plain data: what the scheduler decides and what an engine returns.

```
tokens   0          start            start+len(tokens)
         |-- in KV --|-- this slice --|-- later slices --|
blocks   [block_table .............................. ]
```

Behind the last token of a sequence, a slice may have draft tokens: a guess of how the sequence
goes on. A token is sampled after each of them as if the guess were right, with the noise of its
position, and the scheduler keeps those before which it was.

Input of the penalties: the distinct tokens of a sequence and their counts in its output.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, NewType, Protocol

import numpy as np
import numpy.typing as npt

from baton.types import BlockIndex, SamplingParams, TokenLogprobs

_INITIAL_CAPACITY = 64  # for output tokens that are not in the prompt


class PenaltyCounts(Protocol):
    """The distinct tokens of a sequence up to a position."""

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """Distinct token ids of prompt and output, [n]."""
        ...

    @property
    def output_counts(self) -> npt.NDArray[np.float32]:
        """Count of each of `token_ids` in the output, [n]."""
        ...


class _DraftedCounts(NamedTuple):
    """The counts of a sequence whose output goes on with draft tokens; a PenaltyCounts."""

    token_ids: npt.NDArray[np.int64]
    output_counts: npt.NDArray[np.float32]


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

    def count_draft(self, draft: Sequence[int]) -> PenaltyCounts:
        """The counts if `draft` were output tokens. Valid as long as the views of this object."""
        places = [self._index_of_token.get(token) for token in draft]
        new = dict.fromkeys(
            token for token, place in zip(draft, places, strict=True) if place is None
        )
        counts = np.concatenate((self.output_counts, np.zeros(len(new), np.float32)))
        index_of_new = {token: self._num_distinct + place for place, token in enumerate(new)}
        for token, place in zip(draft, places, strict=True):
            counts[index_of_new[token] if place is None else place] += 1
        return _DraftedCounts(
            np.concatenate((self.token_ids, np.array(list(new), np.int64))), counts
        )


SequenceId = NewType("SequenceId", int)  # process-local, never reused


class TokenMask(Protocol):
    """The tokens that a grammar allows next, computed while the step runs."""

    def wait_for_words(self) -> npt.NDArray[np.int32]:
        """Return the mask, [ceil(vocab / 32)]: token t is allowed if bit t % 32 of word t // 32 is
        set. Waits until it is computed. At least one token is allowed."""
        ...


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How to sample the token that follows a slice.

    The noise is a function of `params.seed`, `choice_index` and `position` alone.
    """

    params: SamplingParams
    choice_index: int
    position: int  # absolute index of the token in prompt + output
    forbidden_token_ids: tuple[int, ...] = ()  # may not be sampled (EOS before min_tokens)
    token_counts: PenaltyCounts | None = None  # input of the penalties; None without penalties
    mask: TokenMask | None = None  # of a grammar; None: every token is allowed
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
    # Sample the next token from the logits of the last one that is not a draft.
    sample_spec: SampleSpec | None
    logprobs_spec: PromptLogprobsSpec | None = None
    draft_specs: tuple[SampleSpec, ...] = ()  # how to sample after each draft, the last tokens

    @property
    def draft_token_ids(self) -> tuple[int, ...]:
        return self.token_ids[len(self.token_ids) - len(self.draft_specs) :]


class SliceResult(NamedTuple):
    """What a step computed for one slice."""

    token_id: int | None = None  # the sampled token; None without `sample_spec`
    logprobs: TokenLogprobs | None = None  # of `token_id`, if its sampling parameters ask for them
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of `target_token_ids`
    is_deferred: bool = False  # nothing was computed: the slice belongs to the next step again
    # What was sampled after each draft; it holds as long as the drafts are what was sampled.
    after_drafts: tuple["SliceResult", ...] = ()


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The slices of one step: decode slices (one token, sampled) and prefill chunks mixed."""

    slices: tuple[SequenceSlice, ...]
    # Copies of whole blocks (source, destination) to make before the forward pass: copy on write.
    block_copies: tuple[tuple[BlockIndex, BlockIndex], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(slice_.token_ids) for slice_ in self.slices)

    @property
    def num_draft_tokens(self) -> int:
        return sum(len(slice_.draft_specs) for slice_ in self.slices)

    def without_deferred(self, results: Sequence[SliceResult]) -> "StepBatch":
        """What was computed of the step, by its results."""
        if not any(result.is_deferred for result in results):
            return self
        computed = zip(self.slices, results, strict=True)
        return replace(self, slices=tuple(s for s, result in computed if not result.is_deferred))


def list_sampled_rows(slices: Sequence[SequenceSlice]) -> tuple[list[int], list[SampleSpec]]:
    """The tokens of all slices after which one is sampled, and how; in the order of the slices.

    A row is the place of a token in the concatenation of all slices.
    """
    rows: list[int] = []
    specs: list[SampleSpec] = []
    end = 0
    for slice_ in slices:
        end += len(slice_.token_ids)
        if slice_.sample_spec is not None:
            rows.extend(range(end - len(slice_.draft_specs) - 1, end))
            specs += (slice_.sample_spec, *slice_.draft_specs)
    return rows, specs


def gather_slice_results(
    slices: Sequence[SequenceSlice], sampled: Iterable[SliceResult]
) -> list[SliceResult]:
    """One result for each slice, from one for each of the rows of `list_sampled_rows`."""
    left = iter(sampled)
    results: list[SliceResult] = []
    for slice_ in slices:
        if slice_.sample_spec is None:
            results.append(SliceResult())
        elif not slice_.draft_specs:
            results.append(next(left))
        else:
            first, *after = (next(left) for _ in range(1 + len(slice_.draft_specs)))
            results.append(first._replace(after_drafts=tuple(after)))
    return results
