"""What a node needs of an engine: one forward pass over one arena of KV blocks."""

from collections.abc import Callable
from typing import Protocol

from baton.kv.blocks import KVLayout
from baton.models.model_identity import ModelIdentity
from node_engine.core.step.step_batch import SliceResult, StepBatch

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
