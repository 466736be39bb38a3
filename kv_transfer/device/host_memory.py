"""Device memory for tests on CPUs: shared memory, and a thread in place of a stream.

The same plane, frames and fences run over it as over a GPU, in the same asynchronous way. It does
not show what a GPU's writes do after a kill: here they end with the process.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from baton.errors import LayoutMismatch, PeerUnreachable, UnmappableSegment
from baton.kv.blocks import KVLayout
from baton.kv.device_event import DeviceEvent
from baton.shared_memory.addressing import BlockAddressSpace
from kv_kernels.reference.block_checksums import compute_checksums
from kv_transfer.arena.arena_slabs import ArenaSlabs
from kv_transfer.core.slabs import SlabRange
from kv_transfer.device.completions import CompletionThread
from kv_transfer.device.device_memory import (
    ArenaExport,
    OnChecksum,
    OnPayload,
    combine_checksums,
)
from kv_transfer.device.writer_process import NO_DRIVER_FILE

HOST_DEVICE = "host"


class NoQueuedWork:
    """Steps on a CPU have ended when they return; a QueuedWork."""

    def has_ended(self) -> bool:
        return True


class HostPeerMemory:
    """A peer's segment, mapped; a PeerMemory."""

    def __init__(self, owner: "HostMemory", slabs: ArenaSlabs) -> None:
        self._owner = owner
        self._slabs = slabs

    def write_slabs(
        self,
        slab_range: SlabRange,
        source: Sequence[int],
        target: Sequence[int],
        on_done: OnChecksum,
        *,
        after: Sequence[DeviceEvent] = (),
        corrupt: bool = False,
    ) -> None:
        own, peer = self._owner.slabs, self._slabs

        def copy() -> None:
            for event in after:
                event.synchronize()
            payload = own.gather_slabs(own.slab_rows(slab_range, source))
            checksum = compute_checksum(payload, slab_range)
            rows = peer.slab_rows(slab_range, target)
            peer.scatter_slabs(rows, payload)
            if corrupt:
                peer.flip_bit(rows)
            on_done(checksum)

        self._owner.stream.put(copy)

    def close(self) -> None:
        """The segment stays mapped: the thread may still hold a view of it."""


class HostMemory:
    """An arena in host memory as if it were a device's; a TransferDevice."""

    driver_file = NO_DRIVER_FILE
    receives = True

    def __init__(
        self,
        arena: memoryview,
        num_blocks: int,
        layout: KVLayout,
        folder: Path,
        segment: str,
        writer_name: str,
    ) -> None:
        """`arena` begins with the node's own `segment`, of `num_blocks` blocks."""
        self.slabs = ArenaSlabs(arena, layout)
        self.stream = CompletionThread("host-device")
        self._layout = layout
        self._folder = folder
        self._segment = segment
        self.writer_name = writer_name
        self.num_blocks = num_blocks
        self._space: BlockAddressSpace | None = None
        self._opened: dict[str, ArenaSlabs] = {}  # segments of peers, as long as their files

    def export_arena(self) -> ArenaExport:
        return ArenaExport(
            kind=HOST_DEVICE,
            device=HOST_DEVICE,
            pid=os.getpid(),
            address=0,
            handle=self._segment,
            offset=0,
            num_blocks=self.num_blocks,
            num_layers=self._layout.num_layers,
            slab_bytes=self._layout.slab_bytes,
        )

    def open_peer(self, export: ArenaExport) -> HostPeerMemory:
        if not self.can_open(export.device):
            raise UnmappableSegment(f"memory of {export.device} cannot be written from a CPU")
        for segment in [name for name in self._opened if not (self._folder / name).exists()]:
            del self._opened[segment]
        if export.handle not in self._opened:
            self._opened[export.handle] = self._map_segment(export.handle)
        return HostPeerMemory(self, self._opened[export.handle])

    def _map_segment(self, segment: str) -> ArenaSlabs:
        if self._space is None:
            self._space = BlockAddressSpace(self._layout.block_bytes, self._folder)
        try:
            return ArenaSlabs(self._space.attach_segment(segment), self._layout)
        except (PeerUnreachable, LayoutMismatch) as error:
            raise UnmappableSegment(error.message) from error

    def can_open(self, export_device: str) -> bool:
        return export_device == HOST_DEVICE

    def mark_queued_work(self, blocks: Sequence[int]) -> NoQueuedWork:
        return NoQueuedWork()

    def check_slabs(
        self,
        slab_range: SlabRange,
        blocks: Sequence[int],
        on_done: OnChecksum,
        *,
        corrupt: bool = False,
    ) -> None:
        rows = self.slabs.slab_rows(slab_range, blocks)
        if corrupt:
            self.slabs.flip_bit(rows)
        self.stream.put(
            lambda: on_done(compute_checksum(self.slabs.gather_slabs(rows), slab_range))
        )

    def read_slabs(
        self,
        slab_range: SlabRange,
        blocks: Sequence[int],
        on_done: OnPayload,
        *,
        after: Sequence[DeviceEvent] = (),
    ) -> None:
        rows = self.slabs.slab_rows(slab_range, blocks)

        def read() -> None:
            for event in after:
                event.synchronize()
            on_done(self.slabs.gather_slabs(rows))

        self.stream.put(read)

    def pass_on_ends(self, *, of_checks: bool) -> None:
        """Nothing to do: the thread passes results on."""

    def close(self) -> None:
        self.stream.close()


def compute_checksum(payload: memoryview, slab_range: SlabRange) -> int:
    """The checksum of slabs that lie layer-major in `payload`.

    It is that of `kv_kernels.triton.block_copy.launch_slab_move`: words in the order of a block's
    layers, zero bytes behind the last one if it is not whole.
    """
    slabs = np.frombuffer(payload, np.uint8).reshape(
        slab_range.num_layers, slab_range.num_blocks, -1
    )
    blocks = np.ascontiguousarray(slabs.swapaxes(0, 1)).reshape(slab_range.num_blocks, -1)
    if tail := blocks.shape[1] % 8:
        blocks = np.pad(blocks, ((0, 0), (0, 8 - tail)))
    return combine_checksums(compute_checksums(blocks.view(np.uint64)))
