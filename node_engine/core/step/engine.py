"""What a node needs of an engine: one forward pass over one arena of KV blocks."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from baton.kv.blocks import KVLayout
from baton.kv.device_event import DeviceEvent
from baton.models.model_identity import ModelIdentity
from baton.types import BlockIndex
from node_engine.core.step.step_batch import SliceResult, StepBatch


class LayerCallback(Protocol):
    """Receives the number of each layer of a step whose KV is in the arena."""

    # Seconds by which the step was slowed because others read its layers. The callback adds its own
    # duration, and the engine what it waits for.
    slowed_seconds: float

    @property
    def blocks(self) -> Sequence[BlockIndex]:
        """The blocks that are read in host memory once the callback was called."""
        ...

    def ends_group(self, layer: int) -> bool:
        """Whether it matters at once that the layers up to this one can be read."""
        ...

    def on_launching(self) -> None:
        """The step is queued on a device from now on; `on_launched` follows, unless it fails.

        Only called if `blocks` is empty, before all other calls but `blocks`."""
        ...

    def on_launched(self, layer_ends: Sequence[DeviceEvent]) -> None:
        """All of the step is queued on a device: layer n is final after `layer_ends[n]`.

        Only called if `blocks` is empty, before the callback itself is called."""
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


class DeviceMemory(NamedTuple):
    """The memory of a device, whoever uses it."""

    total_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class ComputeDevice:
    """What an engine computes on."""

    device: str = "cpu"  # cpu, or cuda:INDEX
    name: str = ""  # as its driver reports it; empty for a CPU
    threads: int = 0  # that compute a step on a CPU; 0 for a GPU
    # Measures the device's own memory; None: the engine computes in host memory. Any thread may
    # call it; it returns None when the device does not answer.
    measure_memory: Callable[[], DeviceMemory | None] | None = None
    # weights in the layout of the native CPU kernels; 0: they do not compute here
    packed_weight_bytes: int = 0
    packed_weight_source: str = ""  # where they were found: segment, cache file or checkpoint


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a model that decide what a step costs."""

    layer_parameters: int  # weights of the matrix products of all layers together
    head_parameters: int  # weights of the product that gives the logits
    attention_width: int  # query heads * head_dim
    windows: tuple[int | None, ...]  # per layer: tokens that a query attends to, None for all


class DeviceLost(Exception):
    """The device is unusable for this process, which must exit; a new process may succeed."""

    @property
    def reason(self) -> str:
        """The first line of the message: torch adds advice for developers."""
        return str(self).partition("\n")[0]


def make_completed_save() -> Future[None]:
    """What `Engine.save_blocks` of an engine that computes in the arena itself returns."""
    saved: Future[None] = Future()
    saved.set_result(None)
    return saved


class Engine(Protocol):
    """A model, or a stand-in for one, over one arena of KV blocks. Compute thread only."""

    compute_device: ComputeDevice
    model_size: ModelSize | None  # None if it has no model

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

    def save_blocks(self, blocks: Sequence[BlockIndex]) -> Future[None]:
        """Write what was computed for these blocks to the arena, so that others can read it.

        The future is completed when it is there, possibly on another thread; until then the blocks
        must keep their contents. An engine that computes in the arena itself has nothing to do.
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

        An engine may defer slices: those that are new beside a step that it has begun ahead of this
        call, and those whose blocks are still being loaded. It never defers all of them.

        Raises OutOfMemory if the device has no memory left; blocks outside the batch are then
        unchanged.
        """
        ...
