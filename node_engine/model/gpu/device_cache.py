"""The KV cache of a GPU node: an arena in device memory, and its copy in host memory.

The scheduler's block numbers are the same in both. The GPU computes in the device arena. Transfer
planes and the shared pool read and write the host arena, which is pinned: blocks are copied between
the two when somebody else reads or has written them, layer by layer while a step runs.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from baton.errors import ConfigError
from baton.types import BlockIndex
from kv_kernels.reference.paged_attention import PagedCache
from kv_kernels.triton.block_copy import copy_blocks_between
from node_engine.core.step.engine import LayerCallback, make_completed_save
from node_engine.core.step.step_batch import SequenceSlice
from node_engine.model.gpu.layer_reporters import (
    CudaLayerReporter,
    CudaLayerSaver,
    HostLayerSaver,
    LayerReporter,
)
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

    def report_layers(
        self, on_layer: LayerCallback, on_saved: Callable[[int], None]
    ) -> LayerReporter:
        """Reports the layers of a step for `on_layer`, calling `on_saved` in its place.

        They are reported once the callback's blocks are in host memory. If it has none, nothing is
        copied: it gets the events of all layers, and they are reported at the ends of groups.
        """
        blocks = on_layer.blocks
        if self._device.type != "cuda":
            return HostLayerSaver(self.cache.arena, self.host, self._as_tensor(blocks), on_saved)
        if not blocks:
            return CudaLayerReporter(on_layer, on_saved)
        return CudaLayerSaver(self.cache.arena, self.host, self._as_tensor(blocks), on_saved)

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
