"""What a node needs of an engine: one forward pass over one arena of KV blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.kv.blocks import KVLayout
from baton.models.model_identity import ModelIdentity
from baton.types import BlockIndex
from node_engine.core.step.step_batch import SliceResult, StepBatch


class LayerCallback(Protocol):
    """Receives the number of each layer of a step whose KV is in the arena."""

    @property
    def blocks(self) -> Sequence[BlockIndex]:
        """The blocks that are read in the arena once the callback was called."""
        ...

    def __call__(self, layer: int) -> None: ...


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """What an engine can use as its KV cache."""

    # Whether it can read blocks outside the arena, in the mapped shared pool. If so, `bind_cache`
    # may get memory that is longer than the arena.
    reads_pool_in_place: bool = True
    # Tokens that a step may write behind those of its batch, if the blocks are there: steps that
    # the engine begins before the scheduler asks for them.
    lookahead_tokens: int = 0


class DeviceLost(Exception):
    """The device is unusable for this process, which must exit; a new process may succeed."""

    @property
    def reason(self) -> str:
        """The first line of the message: torch adds advice for developers."""
        return str(self).partition("\n")[0]


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
    def cache_limits(self) -> CacheLimits: ...

    def bind_cache(self, arena: memoryview, num_blocks: int) -> None:
        """Use `arena` as cache memory: `num_blocks * layout.block_bytes` writable bytes.

        Blocks after these are read only if a block table or a copy names them, and never written.
        """
        ...

    def load_blocks(self, blocks: Sequence[BlockIndex]) -> None:
        """Compute with what others have written to these blocks of the arena, from now on.

        An engine that computes in the arena itself has nothing to do.
        """
        ...

    def save_blocks(self, blocks: Sequence[BlockIndex]) -> None:
        """Return when the arena has what was computed for these blocks, so that others can read it.

        Raises what `run` raises.
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

        An engine that has begun a step ahead of this call may defer slices that are new in it.

        Raises OutOfMemory if the device has no memory left; blocks outside the batch are then
        unchanged.
        """
        ...
