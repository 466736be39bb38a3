"""One step of a node as plain data: what the scheduler decides and what an engine returns.

```
tokens   0          start            start+len(tokens)
         |-- in KV --|-- this slice --|-- later slices --|
blocks   [block_table .............................. ]
```

Input of the penalties: the distinct tokens of a sequence and their counts in its output.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType, Protocol

import numpy as np
import numpy.typing as npt

from baton.kv.kv_layout import KVLayout
from baton.models.model_identity import ModelIdentity
from baton.types import BlockIndex, SamplingParams, TokenLogprobs

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


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The slices of one step: decode slices (one token, sampled) and prefill chunks mixed."""

    slices: tuple[SequenceSlice, ...]
    # Copies of whole blocks (source, destination) to make before the forward pass: copy on write.
    block_copies: tuple[tuple[BlockIndex, BlockIndex], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(slice_.token_ids) for slice_ in self.slices)


# Called with a layer number when the KV of that layer is in the arena for every slice of the step.
LayerCallback = Callable[[int], None]


class DeviceLost(Exception):
    """The device is unusable for this process, which must exit; a new process may succeed."""


class Engine(Protocol):
    """A model, or a stand-in for one, over one arena of KV blocks. Compute thread only."""

    @property
    def layout(self) -> KVLayout: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def model_digest(self) -> bytes:
        """Digest of weights, architecture and revision; KV is exchanged only if it is equal."""
        ...

    @property
    def model_identity(self) -> ModelIdentity:
        """All that tokens and KV depend on; equal on all nodes that may serve one request."""
        ...

    @property
    def can_read_pool_in_place(self) -> bool:
        """Whether the engine can read blocks outside the arena, in the mapped shared pool.

        If so, `bind_cache` may get memory that is longer than the arena.
        """
        ...

    def bind_cache(self, arena: memoryview, num_blocks: int) -> None:
        """Use `arena` as cache memory: `num_blocks * layout.block_bytes` writable bytes.

        Blocks after these are read only if a block table or a copy names them, and never written.
        """
        ...

    def warm_up(
        self, max_batched_tokens: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Do the one-time work of the first steps now (kernel selection, allocations).

        Called after `bind_cache`, while the cache is empty. Steps have at most `max_batched_tokens`
        tokens; no further step begins once `is_wanted` returns False. Raises what `run` raises.
        """
        ...

    def run(
        self, batch: StepBatch, on_layer: LayerCallback | None = None
    ) -> tuple[SliceResult, ...]:
        """Run one forward pass; returns one result per slice.

        Raises OutOfMemory if the device has no memory left; blocks outside the batch are then
        unchanged.
        """
        ...
