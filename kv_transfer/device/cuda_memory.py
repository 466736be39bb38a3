"""DeviceMemory of an NVIDIA GPU: a torch tensor, exported and opened by CUDA IPC.

Copies run on streams of their own, beside the steps of the node. The kernel writes the parts of the
checksums to pinned memory itself, and block numbers are uploaded once for all layers of a hand-off,
so that a copy is one launch.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from baton.errors import UnmappableSegment
from baton.kv.blocks import KVLayout
from kv_kernels.triton.block_copy import SlabPlaces, count_checksum_parts, launch_slab_move
from kv_transfer.core.slabs import SlabRange
from kv_transfer.device.completions import CompletionThread
from kv_transfer.device.cuda_driver_api import UVM_FILE, CudaDriver, CudaError
from kv_transfer.device.cuda_views import map_pinned, view_device_words
from kv_transfer.device.device_memory import (
    ArenaExport,
    DeviceFailed,
    OnChecksum,
    OnPayload,
    combine_checksums,
)

CUDA_DEVICE = "cuda"
_WORD_BYTES = 8
_MIN_SLOT_WORDS = 4096
_KEPT_BLOCK_LISTS = 128


@contextmanager
def _device_errors() -> Iterator[None]:
    """Raise DeviceFailed for errors of torch, Triton and the driver."""
    try:
        yield
    except (RuntimeError, CudaError) as error:
        raise DeviceFailed(f"the GPU failed: {str(error).partition(chr(10))[0][:300]}") from error


class BlockNumbers:
    """Numbers of blocks in device memory: each list is uploaded once for all layers of a hand-off.

    Kernels that read them in pinned memory took three times as long for one layer.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._uploaded: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()

    def upload(self, blocks: Sequence[int]) -> torch.Tensor:
        """The numbers as int32 [n], for launches on the stream."""
        key = tuple(blocks)
        numbers = self._uploaded.get(key)
        if numbers is None:
            host = torch.tensor(key, dtype=torch.int32).pin_memory()
            with torch.cuda.stream(self._stream):
                numbers = self._uploaded[key] = host.to("cuda", non_blocking=True)
            if len(self._uploaded) > _KEPT_BLOCK_LISTS:
                self._uploaded.popitem(last=False)
        self._uploaded.move_to_end(key)
        return numbers


class LaunchSlot:
    """Pinned memory of one launch, for the parts of its checksums."""

    def __init__(self, num_words: int) -> None:
        self.num_words = num_words
        self._host = torch.empty(num_words, dtype=torch.int64, pin_memory=True)
        self._mapped = map_pinned(self._host).view(torch.int64)

    def view_parts(self, count: int, parts: int) -> torch.Tensor:
        """int64 [count, parts], as the GPU sees it."""
        return self._mapped[: count * parts].view(count, parts)

    def read_checksum(self, count: int, parts: int) -> int:
        """The checksum of a launch that has ended."""
        sums = self._host.numpy()[: count * parts].view(np.uint64).reshape(count, parts)
        return combine_checksums(sums.sum(axis=1, dtype=np.uint64))


class LaunchSlots:
    """Free slots, to be used again. Any thread."""

    def __init__(self) -> None:
        self._free: list[LaunchSlot] = []
        self._lock = threading.Lock()

    def take(self, count: int, parts: int) -> LaunchSlot:
        """A slot for a launch over `count` blocks."""
        needed = count * parts
        with self._lock:
            for index, slot in enumerate(self._free):
                if slot.num_words >= needed:
                    return self._free.pop(index)
        return LaunchSlot(max(_MIN_SLOT_WORDS, 1 << (needed - 1).bit_length()))

    def give_back(self, slot: LaunchSlot) -> None:
        with self._lock:
            self._free.append(slot)


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
        corrupt: bool = False,
    ) -> None:
        self._owner.launch_move(
            self._owner.copy_stream,
            slab_range,
            source,
            target,
            self._words,
            on_done,
            corrupt=corrupt,
        )

    def close(self) -> None:
        self._words = self._words[:0]
        if self._mapped:
            self._owner.close_mapping(self._mapped)


class CudaMemory:
    """The arena of a node on a GPU; a DeviceMemory."""

    driver_file = Path(UVM_FILE)

    def __init__(
        self,
        arena: torch.Tensor,  # contiguous, on one GPU; at least `num_blocks` blocks
        num_blocks: int,
        layout: KVLayout,
        writer_name: str,
        *,
        receives: bool,
    ) -> None:
        """`writer_name`: that of the published WriterProcess, empty if peers are not written to.

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
        self._driver = CudaDriver(arena.device.index or 0)
        self._slots = LaunchSlots()
        with torch.cuda.device(self._device):
            self.copy_stream = torch.cuda.Stream()
            self._check_stream = torch.cuda.Stream(priority=-1)
        self._numbers = {
            stream: BlockNumbers(stream) for stream in (self.copy_stream, self._check_stream)
        }
        self._ends = {
            stream: CompletionThread(name)
            for stream, name in (
                (self.copy_stream, "cuda-ipc-copies"),
                (self._check_stream, "cuda-ipc-checks"),
            )
        }

    def warm_up(self) -> None:
        """Compile the kernel for the shapes of hand-offs. Takes seconds the first time."""
        ended = threading.Event()
        for layer in range(min(2, self._layout.num_layers)):
            for layers in {1, min(2, self._layout.num_layers - layer)}:
                slab_range = SlabRange(layer, layers, 0, 1)
                ended.clear()
                self.check_slabs(slab_range, [0], lambda _: ended.set())
                ended.wait()
                ended.clear()
                self.launch_move(
                    self.copy_stream, slab_range, [0], [0], self._words, lambda _: ended.set()
                )
                ended.wait()

    # DeviceMemory

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

    def mark_queued_work(self) -> CudaQueuedWork:
        with _device_errors(), torch.cuda.device(self._device):
            event = torch.cuda.Event()
            event.record()
            return CudaQueuedWork(event)

    def check_slabs(
        self, slab_range: SlabRange, blocks: Sequence[int], on_done: OnChecksum
    ) -> None:
        self.launch_move(self._check_stream, slab_range, blocks, blocks, None, on_done)

    def read_slabs(self, slab_range: SlabRange, blocks: Sequence[int], on_done: OnPayload) -> None:
        with _device_errors():
            host = torch.empty(len(blocks) * self._slab_words, dtype=torch.int64, pin_memory=True)
            target = SlabPlaces(map_pinned(host).view(torch.int64), self._slab_words, 0)

            def finish(result: int | DeviceFailed) -> None:
                if isinstance(result, DeviceFailed):
                    on_done(result)
                else:
                    on_done(host.numpy().data.cast("B"))

            self._launch(
                self.copy_stream, slab_range, blocks, list(range(len(blocks))), target, finish
            )

    def flip_bit(self, layer: int, block: int) -> None:
        word = block * self._block_words + layer * self._slab_words
        with _device_errors(), torch.cuda.stream(self._check_stream):
            self._words[word].bitwise_xor_(1)

    def close(self) -> None:
        for thread in self._ends.values():
            thread.close()

    # launches

    def launch_move(
        self,
        stream: torch.cuda.Stream,
        slab_range: SlabRange,
        source: Sequence[int],
        target: Sequence[int],
        target_words: torch.Tensor | None,
        on_done: OnChecksum,
        *,
        corrupt: bool = False,
    ) -> None:
        """Copy slabs to an arena of the same layout, or only sum them. Raises DeviceFailed."""
        first_word = slab_range.first_layer * self._slab_words
        with _device_errors():
            places = None
            if target_words is not None:
                places = SlabPlaces(target_words, self._block_words, first_word)
            flipped = target[0] * self._block_words + first_word if corrupt else None
            self._launch(stream, slab_range, source, target, places, on_done, flipped)

    def _launch(
        self,
        stream: torch.cuda.Stream,
        slab_range: SlabRange,
        source: Sequence[int],
        target: Sequence[int],
        places: SlabPlaces | None,
        on_done: OnChecksum,
        flipped_word: int | None = None,
    ) -> None:
        words = slab_range.num_layers * self._slab_words
        parts, count = count_checksum_parts(words), len(source)
        slot = self._slots.take(count, parts)
        first_word = slab_range.first_layer * self._slab_words
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            launch_slab_move(
                SlabPlaces(self._words, self._block_words, first_word),
                places,
                self._numbers[stream].upload(source),
                self._numbers[stream].upload(target),
                words,
                slot.view_parts(count, parts),
            )
            if flipped_word is not None and places is not None:
                places.words[flipped_word].bitwise_xor_(1)
            ended = torch.cuda.Event(blocking=True)
            ended.record()
        self._ends[stream].put(self._waiter(ended, slot, count, parts, on_done))

    def _waiter(
        self,
        ended: torch.cuda.Event,
        slot: LaunchSlot,
        count: int,
        parts: int,
        on_done: OnChecksum,
    ) -> Callable[[], None]:
        def wait() -> None:
            try:
                with _device_errors():
                    ended.synchronize()
            except DeviceFailed as error:
                on_done(error)  # the slot may still be written
                return
            checksum = slot.read_checksum(count, parts)
            self._slots.give_back(slot)
            on_done(checksum)

        return wait
