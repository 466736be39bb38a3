"""TransferDevice of an NVIDIA GPU: a torch tensor, exported and opened by CUDA IPC.

Copies run on streams of their own, beside the steps of the node. The kernel writes the parts of the
checksums to pinned memory itself, and block numbers are uploaded once for all layers of a hand-off,
so that copying layers that are final is one launch.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch

from baton.errors import UnmappableSegment
from baton.kv.blocks import KVLayout
from baton.kv.device_event import DeviceEvent
from kv_kernels.triton.block_copy import (
    ChecksumParts,
    SlabPlaces,
    count_checksum_parts,
    launch_slab_move,
)
from kv_transfer.core.slabs import SlabRange
from kv_transfer.device.cuda_driver_api import UVM_FILE, CudaDriver, CudaError
from kv_transfer.device.cuda_launches import (
    LaunchQueue,
    LaunchSlots,
    LaunchStreams,
    LayerSpan,
    QueuedLaunch,
    split_layers,
    wait_for_event,
)
from kv_transfer.device.cuda_views import map_pinned, view_device_words
from kv_transfer.device.device_memory import (
    ArenaExport,
    DeviceFailed,
    OnChecksum,
    OnPayload,
)

CUDA_DEVICE = "cuda"
VoidLoads = Callable[[Sequence[int]], None]
_WORD_BYTES = 8
# Copies of single layers overlap: on an H200 they reach 77% of a contiguous copy, and 49% with one.
_COPY_STREAMS = 4


@contextmanager
def _device_errors() -> Iterator[None]:
    """Raise DeviceFailed for errors of torch, Triton and the driver.

    Triton raises ValueError for memory that the device cannot reach.
    """
    try:
        yield
    except (RuntimeError, CudaError, ValueError) as error:
        raise _to_device_failed(error) from error


def _to_device_failed(error: Exception) -> DeviceFailed:
    return DeviceFailed(f"the GPU failed: {str(error).partition(chr(10))[0][:300]}")


@dataclass(frozen=True, slots=True)
class CudaQueuedWork:
    """A point in a stream; a QueuedWork."""

    event: torch.cuda.Event

    def has_ended(self) -> bool:
        with _device_errors():
            return bool(self.event.query())


class CudaPeerMemory:
    """A peer's arena, opened; a PeerMemory."""

    def __init__(self, owner: "CudaMemory", words: torch.Tensor, mapped: int) -> None:
        """`mapped`: the address of the allocation that was opened; 0 if it is this process's."""
        self._owner = owner
        self._words = words
        self._mapped = mapped

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
        self._owner.copy_slabs(
            slab_range, source, target, self._words, on_done, after=after, corrupt=corrupt
        )

    def close(self) -> None:
        self._words = self._words[:0]
        if self._mapped:
            self._owner.close_mapping(self._mapped)


class CudaMemory:
    """The arena of a node on a GPU; a TransferDevice."""

    driver_file = Path(UVM_FILE)

    def __init__(
        self,
        arena: torch.Tensor,  # contiguous, on one GPU; at least `num_blocks` blocks
        num_blocks: int,
        layout: KVLayout,
        writer_name: str,
        *,
        receives: bool,
        void_loads: VoidLoads = lambda _: None,
    ) -> None:
        """`writer_name`: that of the published ProvableWriter, empty if peers are not written to.

        `void_loads` lets no earlier load from host memory change blocks; see GpuEngine.void_loads.
        Raises UnmappableSegment for slabs that the kernel cannot copy, and CudaError.
        """
        if layout.slab_bytes % _WORD_BYTES:
            raise UnmappableSegment(f"slabs of {layout.slab_bytes} bytes are not whole words")
        self.num_blocks = num_blocks
        self.receives = receives
        self._device = arena.device
        self._words = arena.view(-1).view(torch.int64)[: num_blocks * layout.block_bytes // 8]
        self._layout = layout
        self._slab_words = layout.slab_bytes // _WORD_BYTES
        self._block_words = layout.block_bytes // _WORD_BYTES
        self.writer_name = writer_name
        self._void_loads = void_loads
        self._driver = CudaDriver(arena.device.index or 0)
        self._slots = LaunchSlots()
        with torch.cuda.device(self._device):
            copy_streams = LaunchStreams.make(_COPY_STREAMS, _COPY_STREAMS)
            check_streams = LaunchStreams.make(1, priority=-1)
        self._copies = LaunchQueue("cuda-ipc-copies", copy_streams)
        self._checks = LaunchQueue("cuda-ipc-checks", check_streams)

    def warm_up(self) -> None:
        """Compile the kernel for the shapes of hand-offs. Takes seconds the first time."""
        for layer in range(min(2, self._layout.num_layers)):
            for layers in {1, min(2, self._layout.num_layers - layer)}:
                slab_range = SlabRange(layer, layers, 0, 1)
                done: SimpleQueue[int | DeviceFailed] = SimpleQueue()
                self.check_slabs(slab_range, [0], done.put)
                self.copy_slabs(slab_range, [0], [0], self._words, done.put)
                self._checks.pass_on_ends()
                self._copies.pass_on_ends()
                for result in (done.get(), done.get()):
                    if isinstance(result, DeviceFailed):
                        raise result

    # TransferDevice

    def export_arena(self) -> ArenaExport:
        address = self._words.data_ptr()
        try:
            self._driver.make_current()
            start, _ = self._driver.find_allocation(address)
            handle = self._driver.export_memory(start)
            device = self._driver.device_uuid()
        except CudaError as error:
            raise UnmappableSegment(f"the arena cannot be exported: {error}") from error
        return ArenaExport(
            kind=CUDA_DEVICE,
            device=device,
            pid=os.getpid(),
            address=address,
            handle=handle.hex(),
            offset=address - start,
            num_blocks=self.num_blocks,
            num_layers=self._layout.num_layers,
            slab_bytes=self._layout.slab_bytes,
        )

    def open_peer(self, export: ArenaExport) -> CudaPeerMemory:
        if export.kind != CUDA_DEVICE or not self.can_open(export.device):
            raise UnmappableSegment(
                f"this GPU cannot write to the memory of device {export.device!r}"
            )
        size = export.num_blocks * self._layout.block_bytes
        try:
            with torch.cuda.device(self._device):
                self._driver.make_current()
                if export.pid == os.getpid():  # a handle cannot be opened where it was made
                    self._driver.enable_peer_access(export.device)
                    return CudaPeerMemory(self, view_device_words(export.address, size), 0)
                mapped = self._driver.open_memory(bytes.fromhex(export.handle))
                words = view_device_words(mapped + export.offset, size)
                return CudaPeerMemory(self, words, mapped)
        except (CudaError, RuntimeError, ValueError) as error:
            raise UnmappableSegment(f"the peer's arena cannot be opened: {error}") from error

    def can_open(self, export_device: str) -> bool:
        try:
            self._driver.make_current()
            return self._driver.can_access(export_device)
        except CudaError:
            return False

    def close_mapping(self, mapped: int) -> None:
        """Unmap a peer's allocation; what fails now fails at the end of the process too."""
        try:
            self._driver.make_current()
            self._driver.close_memory(mapped)
        except CudaError:
            return

    def mark_queued_work(self, blocks: Sequence[int]) -> CudaQueuedWork:
        with _device_errors(), torch.cuda.device(self._device):
            self._void_loads(blocks)
            event = torch.cuda.Event()
            event.record()
            return CudaQueuedWork(event)

    def check_slabs(
        self,
        slab_range: SlabRange,
        blocks: Sequence[int],
        on_done: OnChecksum,
        *,
        corrupt: bool = False,
    ) -> None:
        with _device_errors():
            if corrupt:
                self._flip_bit(slab_range.first_layer, blocks[0])
            self._launch(self._checks, slab_range, blocks, blocks, None, on_done)

    def read_slabs(
        self,
        slab_range: SlabRange,
        blocks: Sequence[int],
        on_done: OnPayload,
        *,
        after: Sequence[DeviceEvent] = (),
    ) -> None:
        with _device_errors():
            host = torch.empty(len(blocks) * self._slab_words, dtype=torch.int64, pin_memory=True)
            target = SlabPlaces(map_pinned(host).view(torch.int64), self._slab_words, 0)

            def finish(result: int | DeviceFailed) -> None:
                if isinstance(result, DeviceFailed):
                    on_done(result)
                else:
                    on_done(host.numpy().data.cast("B"))

            numbers = range(len(blocks))
            self._launch(self._copies, slab_range, blocks, numbers, target, finish, after=after)

    def _flip_bit(self, layer: int, block: int) -> None:
        word = block * self._block_words + layer * self._slab_words
        with torch.cuda.stream(self._checks.streams.ready[0]):
            self._words[word].bitwise_xor_(1)

    def pass_on_ends(self, *, of_checks: bool) -> None:
        (self._checks if of_checks else self._copies).pass_on_ends()

    def close(self) -> None:
        self._copies.close()
        self._checks.close()

    # launches

    def copy_slabs(
        self,
        slab_range: SlabRange,
        source: Sequence[int],
        target: Sequence[int],
        target_words: torch.Tensor,  # int64, of an arena of the same layout
        on_done: OnChecksum,
        *,
        after: Sequence[DeviceEvent] = (),
        corrupt: bool = False,
    ) -> None:
        """Copy slabs to another arena; see PeerMemory.write_slabs. Raises DeviceFailed."""
        first_word = slab_range.first_layer * self._slab_words
        with _device_errors():
            places = SlabPlaces(target_words, self._block_words, first_word)
            flipped = target[0] * self._block_words + first_word if corrupt else None
            self._launch(
                *(self._copies, slab_range, source, target, places, on_done),
                after=after,
                flipped_word=flipped,
            )

    def _launch(
        self,
        queue: LaunchQueue,
        slab_range: SlabRange,
        source: Sequence[int],
        target: Sequence[int],
        places: SlabPlaces | None,
        on_done: OnChecksum,
        *,
        after: Sequence[DeviceEvent] = (),
        flipped_word: int | None = None,
    ) -> None:
        spans = split_layers(slab_range.num_layers, len(source) * self._layout.slab_bytes, after)
        parts = sum(count_checksum_parts(span.num_layers * self._slab_words) for span in spans)
        count = len(source)
        slot = self._slots.take(count, parts)
        first_word = slab_range.first_layer * self._slab_words
        with torch.cuda.device(self._device):
            is_waiting = spans[-1].after is not None
            stream = queue.choose_stream(source, is_waiting=is_waiting)
            read = queue.block_numbers.upload(source, stream)
            written = queue.block_numbers.upload(target, stream)
            with torch.cuda.stream(stream):
                own = SlabPlaces(self._words, self._block_words, first_word)
                checksums = ChecksumParts(slot.view_parts(count, parts))
                self._launch_spans(spans, own, places, (read, written), checksums)
                ended = torch.cuda.Event(blocking=True)
                ended.record()
        if flipped_word is not None and places is not None:
            _flip_bit_after(ended, places.words, flipped_word)

        def finish() -> None:
            checksum = slot.read_checksum(count, parts)
            self._slots.give_back(slot)
            on_done(checksum)

        def fail(error: RuntimeError) -> None:  # the slot may still be written: not used again
            on_done(_to_device_failed(error))

        queue.add_launch(QueuedLaunch(ended, finish, fail, (read, written), spans[-1].after))

    def _launch_spans(
        self,
        spans: Sequence[LayerSpan],
        own: SlabPlaces,
        places: SlabPlaces | None,
        blocks: tuple[torch.Tensor, torch.Tensor],  # int32 [n] each: read and written
        checksums: ChecksumParts,
    ) -> None:
        """Launch the kernel for each span of layers, on the current stream."""
        for span in spans:
            wait_for_event(torch.cuda.current_stream(), span.after)
            words = span.num_layers * self._slab_words
            launch_slab_move(own, places, *blocks, words, checksums)
            own, checksums = own.skip(words), checksums.skip(words)
            places = None if places is None else places.skip(words)


def _flip_bit_after(ended: torch.cuda.Event, words: torch.Tensor, word: int) -> None:
    """For tests: change one bit of what a launch has written, perhaps on another device."""
    ended.synchronize()
    words[word].bitwise_xor_(1)
    torch.cuda.synchronize(words.device)
