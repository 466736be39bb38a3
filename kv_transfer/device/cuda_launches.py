"""What launches of the slab kernel need: streams, numbers of blocks, and memory for checksums."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch

from baton.process.clock import monotonic_clock
from kv_transfer.device.completions import CompletionThread
from kv_transfer.device.cuda_views import map_pinned
from kv_transfer.device.device_memory import combine_checksums

_MIN_SLOT_WORDS = 4096
_KEPT_BLOCK_LISTS = 128
_BRIEF_SECONDS = 0.0005  # a copy of 64 MiB takes half of it
_LAUNCHES_AFTER_LONG_ONE = 32  # that are not waited for on the launching thread


@dataclass(slots=True)
class _UploadedNumbers:
    numbers: torch.Tensor  # int32 [n]
    uploaded: torch.cuda.Event
    waiting_streams: set[int]  # places of the streams that wait for the event, or have waited


class BlockNumbers:
    """Numbers of blocks in device memory: each list is uploaded once for all layers of a hand-off.

    An upload takes longer than a launch. Kernels that read them in pinned memory took three times
    as long for one layer.
    """

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        self._streams = streams
        self._uploaded: OrderedDict[tuple[int, ...], _UploadedNumbers] = OrderedDict()

    def upload(self, blocks: Sequence[int], place: int) -> torch.Tensor:
        """The numbers as int32 [n], for launches on the stream at this place.

        Keep the tensor until the last of these launches has ended.
        """
        key = tuple(blocks)
        found = self._uploaded.get(key)
        if found is None:
            found = self._uploaded[key] = self._begin_upload(key, place)
            if len(self._uploaded) > _KEPT_BLOCK_LISTS:
                self._uploaded.popitem(last=False)
        else:
            self._uploaded.move_to_end(key)
        if place not in found.waiting_streams:
            self._streams[place].wait_event(found.uploaded)
            found.waiting_streams.add(place)
        return found.numbers

    def _begin_upload(self, blocks: tuple[int, ...], place: int) -> _UploadedNumbers:
        host = torch.tensor(blocks, dtype=torch.int32).pin_memory()
        with torch.cuda.stream(self._streams[place]):
            numbers = host.to("cuda", non_blocking=True)
            uploaded = torch.cuda.Event()
            uploaded.record()
        return _UploadedNumbers(numbers, uploaded, {place})


class LaunchQueue:
    """Streams that are used in turn, and the thread that waits for what they do, in its order."""

    def __init__(self, name: str, streams: Sequence[torch.cuda.Stream]) -> None:
        self.streams = streams
        self.ends = CompletionThread(name)
        self.block_numbers = BlockNumbers(streams)
        self._turns = cycle(range(len(streams)))
        self._launches_to_skip = 0

    def next_stream(self) -> int:
        """The place of the stream of the next launch."""
        return next(self._turns)

    def wait_briefly(self, ended: torch.cuda.Event) -> bool:
        """Wait for the last launch on the thread that has launched it; False if it takes long.

        Two threads would wake each other otherwise, which takes longer than most launches. Where a
        launch took long, because others use the GPU, later ones are left to the other thread for a
        while. So are those behind a launch that is left to it: they end in their order.
        """
        if not self.ends.is_idle:
            return False
        if self._launches_to_skip:
            self._launches_to_skip -= 1
            return False
        deadline = monotonic_clock() + _BRIEF_SECONDS
        while not ended.query():
            if monotonic_clock() >= deadline:
                self._launches_to_skip = _LAUNCHES_AFTER_LONG_ONE
                return False
        return True


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
