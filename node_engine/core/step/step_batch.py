"""One step of a node as plain data: what the scheduler decides and what an engine returns.

```
tokens   0          start            start+len(tokens)
         |-- in KV --|-- this slice --|-- later slices --|
blocks   [block_table .............................. ]
```
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType, Protocol

from baton.kv.kv_layout import KVLayout
from baton.models.model_identity import ModelIdentity
from baton.types import BlockIndex, SamplingParams, TokenLogprobs
from node_engine.core.step.token_counts import TokenCounts

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
