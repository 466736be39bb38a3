"""The KV cache of a GPU node: an arena in device memory, and its copy in host memory.

The scheduler's block numbers are the same in both. The GPU computes in the device arena. Transfer
planes and the shared pool read and write the host arena, which is pinned: blocks are copied between
the two when somebody else reads or has written them, layer by layer while a step runs.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from baton.errors import ConfigError
from baton.types import BlockIndex
from kv_kernels.reference.paged_attention import PagedCache
from kv_kernels.triton.block_copy import copy_blocks_between
from node_engine.core.step.engine import make_completed_save
from node_engine.core.step.step_batch import SequenceSlice
from node_engine.model.gpu.side_copies import SideCopies


def copy_numbers_to_device(
    numbers: Sequence[object], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The numbers on the device, by a copy that the host does not wait for."""
    tensor = torch.tensor(numbers, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class DeviceCache:
    """Both arenas of one node. Compute thread only."""

    def __init__(self, host: torch.Tensor) -> None:
        """`host`: [blocks, layers, 2, kv_heads, block_size, dim], pinned and mapped for the GPU.

        Raises ConfigError if as much memory is not free on the device.
        """
        self.host = host
        self.num_blocks = len(host)
        self._device = host.device
        # One block more than the scheduler knows: rows that pad a graph write there.
        shape = (self.num_blocks + 1, *host.shape[1:])
        self._require_memory(torch.Size(shape).numel() * host.itemsize)
        self.cache = PagedCache.from_arena(
            torch.zeros(shape, dtype=host.dtype, device=self._device)
        )
        self._unloaded_blocks: dict[BlockIndex, None] = {}
        self._side_copies = SideCopies() if self._device.type == "cuda" else None

    @property
    def scratch_block(self) -> int:
        return self.num_blocks

    def mark_host_written(self, blocks: Sequence[BlockIndex]) -> None:
        """Others wrote these blocks in host memory: the next step copies them to the device."""
        self._unloaded_blocks.update(dict.fromkeys(blocks))

    def void_loads(self, blocks: Sequence[int]) -> None:
        """Drop the marks of blocks that a peer writes on the device, and wait for their loads."""
        for block in blocks:
            self._unloaded_blocks.pop(BlockIndex(block), None)
        copies = self._side_copies
        if copies is not None and not copies.find_loading_blocks().isdisjoint(blocks):
            copies.wait_for_loads()

    def load_marked_blocks(self) -> None:
        """Queue the copies of blocks that were marked since the last call, beside running steps."""
        if not self._unloaded_blocks:
            return
        blocks = list(self._unloaded_blocks)
        if self._side_copies is None:
            copy_blocks_between(self.host, self.cache.arena, self._as_tensor(blocks))
        else:
            self._side_copies.load_blocks(
                self.host, self.cache.arena, self._as_tensor(blocks), blocks
            )
        self._unloaded_blocks.clear()

    def find_unloaded_slices(self, slices: Sequence[SequenceSlice]) -> set[int]:
        """The slices, by their index, whose blocks are not on the device yet."""
        if self._side_copies is None or not (loading := self._side_copies.find_loading_blocks()):
            return set()
        return {
            index
            for index, slice_ in enumerate(slices)
            if not loading.isdisjoint(slice_.block_table)
        }

    def wait_for_loads(self) -> None:
        """Let the steps that are launched from now on wait for all queued loads."""
        if self._side_copies is not None:
            self._side_copies.wait_for_loads()

    def save_blocks(self, blocks: Sequence[BlockIndex]) -> Future[None]:
        """Queue a copy to the host arena, beside running steps; see Engine.save_blocks."""
        self.load_marked_blocks()
        self.wait_for_loads()
        if self._side_copies is not None:
            return self._side_copies.save_blocks(
                self.cache.arena, self.host, self._as_tensor(blocks)
            )
        copy_blocks_between(self.cache.arena, self.host, self._as_tensor(blocks))
        return make_completed_save()

    def save_layers(
        self, blocks: Sequence[BlockIndex], on_saved: Callable[[int], None]
    ) -> "LayerSaver":
        """A saver for the layers of one step; `on_saved` gets each layer that is in host memory."""
        saver = CudaLayerSaver if self._device.type == "cuda" else LayerSaver
        return saver(self.cache.arena, self.host, self._as_tensor(blocks), on_saved)

    def _as_tensor(self, blocks: Sequence[BlockIndex]) -> torch.Tensor:
        return copy_numbers_to_device(blocks, torch.int32, self._device)

    def _require_memory(self, needed: int) -> None:
        if self._device.type != "cuda":
            return
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        if needed > free:
            raise ConfigError(
                f"the KV cache needs {needed} bytes on the GPU and {free} of {total} are free after"
                " the model's weights: lower --kv-memory"
            )


class LayerSaver:
    """Copies a step's blocks to host memory, layer by layer, in the order of the launches."""

    def __init__(
        self,
        device: torch.Tensor,
        host: torch.Tensor,
        blocks: torch.Tensor,  # int32 [n]
        on_saved: Callable[[int], None],
    ) -> None:
        self._device, self._host, self._blocks = device, host, blocks
        self._on_saved = on_saved

    def on_layer_written(self, layer: int) -> None:
        """The launches that write this layer are queued: queue its copy."""
        copy_blocks_between(self._device, self._host, self._blocks, layer)
        self._on_saved(layer)

    def finish(self) -> None:
        """Report the remaining layers; returns when all copies have ended."""

    def measure_copy_wait(self) -> float:
        """After `finish`: seconds by which the last copy ended later than the step itself."""
        return 0.0

    @contextmanager
    def finished_at_exit(self) -> Iterator[None]:
        """Leave no copy running, whatever the block raises."""
        yield
        self.finish()


class CudaLayerSaver(LayerSaver):
    """Copies on a stream of its own, ordered by events, so that no kernel waits for a copy."""

    _stream: torch.cuda.Stream | None = None

    def __init__(
        self,
        device: torch.Tensor,
        host: torch.Tensor,
        blocks: torch.Tensor,
        on_saved: Callable[[int], None],
    ) -> None:
        super().__init__(device, host, blocks, on_saved)
        if CudaLayerSaver._stream is None:
            CudaLayerSaver._stream = torch.cuda.Stream()
        self._side = CudaLayerSaver._stream
        self._side.wait_stream(torch.cuda.current_stream())
        self._saved: list[tuple[int, torch.cuda.Event]] = []
        self._num_reported = 0
        self._computed = torch.cuda.Event(enable_timing=True)

    def on_layer_written(self, layer: int) -> None:
        written = torch.cuda.Event()
        written.record()
        with torch.cuda.stream(self._side):
            self._side.wait_event(written)
            copy_blocks_between(self._device, self._host, self._blocks, layer)
            saved = torch.cuda.Event(enable_timing=True)
            saved.record()
        self._saved.append((layer, saved))
        while self._num_reported < len(self._saved) and self._saved[self._num_reported][1].query():
            self._report_next()

    def finish(self) -> None:
        self._computed.record()
        while self._num_reported < len(self._saved):
            self._saved[self._num_reported][1].synchronize()
            self._report_next()

    def measure_copy_wait(self) -> float:
        if not self._saved or not self._computed.query():
            return 0.0  # the copies have ended first
        milliseconds: float = self._computed.elapsed_time(self._saved[-1][1])
        return max(0.0, milliseconds * 1e-3)

    @contextmanager
    def finished_at_exit(self) -> Iterator[None]:
        try:
            yield
            self.finish()
        finally:
            # The next step of this stream may overwrite what is being copied.
            self._side.synchronize()

    def _report_next(self) -> None:
        layer, _ = self._saved[self._num_reported]
        self._num_reported += 1
        self._on_saved(layer)
