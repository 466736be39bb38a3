"""One step of a node as plain data: what the scheduler decides and what an engine answers.

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
    """How to draw the token that follows a slice. `position` is the token's absolute index in
    prompt + output, which with `seed` and `choice_index` fixes the noise. `forbidden_token_ids` are
    ids that may not be drawn (EOS before min_tokens). `token_counts` is what the penalties count,
    None if `params` has none."""

    params: SamplingParams
    choice_index: int
    position: int
    forbidden_token_ids: tuple[int, ...] = ()
    token_counts: TokenCounts | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobsSpec:
    """Score the tokens of a prompt: `targets[i]` is the one that follows the slice's i-th token.
    `top_logprobs` is how many of the most likely ones to give beside each."""

    target_token_ids: tuple[int, ...]
    top_logprobs: int


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One sequence's share of a step: compute KV of `token_ids` at positions start.. and, if
    `sample_spec` is set, draw the next token from the logits of the last one. `block_table` covers
    at least positions 0 .. start + len(tokens). `logprobs_spec` asks for the scores of prompt
    tokens as well."""

    sequence_id: SequenceId
    token_ids: tuple[int, ...]
    start: int
    block_table: Sequence[BlockIndex]
    sample_spec: SampleSpec | None
    logprobs_spec: PromptLogprobsSpec | None = None


class SliceResult(NamedTuple):
    """What a slice gave: the token drawn, if `sample` was set, with its score, if its `logprobs` is
    set, and a score for each of `scoring.targets`."""

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Slices of one step, decode slices (one token, sampled) and prefill chunks mixed.
    `block_copies` are whole-block copies (source, destination) to be made before the forward pass:
    copy on write."""

    slices: tuple[SequenceSlice, ...]
    block_copies: tuple[tuple[BlockIndex, BlockIndex], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(piece.token_ids) for piece in self.slices)


LayerCallback = Callable[
    [int], None
]  # called with k when the KV of layer k is in the arena for every slice of the step


class DeviceLost(Exception):
    """The device can compute nothing more for this process, which must end: a new one may find it
    well."""


class Engine(Protocol):
    """A model, or something that behaves like one, over one arena of blocks. Called on the compute
    thread only, once that runs."""

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
        """Digest of weights, architecture and revision: two nodes may exchange KV only if it is
        equal."""
        ...

    @property
    def model_identity(self) -> ModelIdentity:
        """All that tokens and KV depend on: two nodes may serve one request only if it is equal."""
        ...

    @property
    def can_read_pool_in_place(self) -> bool:
        """Whether it can read blocks beside the arena, where they are: what is bound may then be
        longer."""
        ...

    def bind_cache(self, arena: memoryview, num_blocks: int) -> None:
        """Adopt the cache memory: `num_blocks * layout.block_bytes` writable bytes, layout as in
        KVLayout. Blocks that follow, of which nothing is touched unless a block table or a copy
        names it, are read and not written."""
        ...

    def warm_up(self, max_batched_tokens: int, wanted: Callable[[], bool] = lambda: True) -> None:
        """Do now what would be done once, in the first steps, with no more tokens in one than there
        will be, as long as it is `wanted`. After `bind_cache`, before anything is in the cache.
        Raises what `run` does."""
        ...

    def run(
        self, batch: StepBatch, on_layer: LayerCallback | None = None
    ) -> tuple[SliceResult, ...]:
        """One forward pass. Returns what each slice gave.

        Raises OutOfMemory when the device has no memory left; the cache is then unchanged outside
        the batch's blocks.
        """
        ...
