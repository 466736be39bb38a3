"""What launches of the slab kernel need: streams, numbers of blocks, and memory for checksums."""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch

from baton.kv.device_event import DeviceEvent
from baton.process.clock import monotonic_clock
from kv_transfer.device.completions import CompletionThread
from kv_transfer.device.cuda_views import map_pinned
from kv_transfer.device.device_memory import combine_checksums

_MIN_SLOT_WORDS = 4096
_KEPT_BLOCK_LISTS = 128
# Each layer of a long prompt is copied as soon as it is computed: its KV is still in the GPU's L2
# cache. Layers of short prompts are copied together, because each launch takes CPU time.
_MIN_LAUNCH_BYTES = 4 << 20
_BRIEF_SECONDS = 0.0005  # a copy of 64 MiB takes half of it
_TURNS_AFTER_LONG_LAUNCH = 32  # in which launches are not waited for


@dataclass(frozen=True, slots=True)
class LaunchStreams:
    """The streams of a queue.

    Launches that wait for an event have streams of their own: a launch that could begin at once
    would wait for them. So would an upload.
    """

    upload: torch.cuda.Stream
    ready: Sequence[torch.cuda.Stream]
    waiting: Sequence[torch.cuda.Stream] = ()

    @staticmethod
    def make(num_ready: int, num_waiting: int = 0, priority: int = 0) -> "LaunchStreams":
        """New streams on the current device."""
        upload, *others = (
            torch.cuda.Stream(priority=priority) for _ in range(1 + num_ready + num_waiting)
        )
        return LaunchStreams(upload, others[:num_ready], others[num_ready:])


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """Consecutive layers that one launch copies."""

    num_layers: int
    after: DeviceEvent | None = None  # None: they are final


def split_layers(
    num_layers: int, layer_bytes: int, layer_ends: Sequence[DeviceEvent]
) -> list[LayerSpan]:
    """How layers are divided among launches, of which each waits for its own last layer.

    `layer_ends`: one event for each layer, in the order in which they pass; none if all have
    passed. Raises RuntimeError if the device has failed.
    """
    if not layer_ends:
        return [LayerSpan(num_layers)]
    passed = next(
        (layer for layer, event in enumerate(layer_ends) if not event.query()), num_layers
    )
    spans = [LayerSpan(passed)] if passed else []
    step = max(1, -(-_MIN_LAUNCH_BYTES // layer_bytes))
    for first in range(passed, num_layers, step):
        last = min(first + step, num_layers)
        spans.append(LayerSpan(last - first, layer_ends[last - 1]))
    return spans


def wait_for_event(stream: torch.cuda.Stream, event: DeviceEvent | None) -> None:
    """Make later launches on the stream wait for the event."""
    if event is not None:
        assert isinstance(event, torch.cuda.Event)
        stream.wait_event(event)


@dataclass(slots=True)
class _UploadedNumbers:
    numbers: torch.Tensor  # int32 [n]
    uploaded: torch.cuda.Event
    waiting_streams: set[torch.cuda.Stream]  # that wait for the event, or have waited


class BlockNumbers:
    """Numbers of blocks in device memory: each list is uploaded once for all layers of a hand-off.

    An upload takes longer than a launch. Kernels that read them in pinned memory took three times
    as long for one layer.
    """

    def __init__(self, upload_stream: torch.cuda.Stream) -> None:
        self._stream = upload_stream
        self._uploaded: OrderedDict[tuple[int, ...], _UploadedNumbers] = OrderedDict()

    def upload(self, blocks: Sequence[int], stream: torch.cuda.Stream) -> torch.Tensor:
        """The numbers as int32 [n], for launches on the stream.

        Keep the tensor until the last of these launches has ended.
        """
        key = tuple(blocks)
        found = self._uploaded.get(key)
        if found is None:
            found = self._uploaded[key] = self._begin_upload(key)
            if len(self._uploaded) > _KEPT_BLOCK_LISTS:
                self._uploaded.popitem(last=False)
        else:
            self._uploaded.move_to_end(key)
        if stream not in found.waiting_streams:
            stream.wait_event(found.uploaded)
            found.waiting_streams.add(stream)
        return found.numbers

    def _begin_upload(self, blocks: tuple[int, ...]) -> _UploadedNumbers:
        host = torch.tensor(blocks, dtype=torch.int32).pin_memory()
        with torch.cuda.stream(self._stream):
            numbers = host.to(self._stream.device, non_blocking=True)
            uploaded = torch.cuda.Event()
            uploaded.record()
        return _UploadedNumbers(numbers, uploaded, set())


@dataclass(frozen=True, slots=True, eq=False)
class QueuedLaunch:
    """A launch that the device computes."""

    ended: torch.cuda.Event
    finish: Callable[[], None]  # passes its result on; it must not raise
    on_failed: Callable[[RuntimeError], None]  # passes on that the device has failed
    kept: object  # what the launch reads, kept alive until it has ended
    after: DeviceEvent | None = None  # that has to pass before it begins

    def may_have_begun(self) -> bool:
        try:
            return self.after is None or self.after.query()
        except RuntimeError:  # waiting for its end finds out why
            return True

    def wait_and_finish(self) -> None:
        try:
            self.ended.synchronize()
        except RuntimeError as error:
            self.on_failed(error)
            return
        self.finish()


class LaunchQueue:
    """Streams of launches, and the waiting for them, in their order.

    The launching thread waits for short launches itself. A thread of the queue waits for the
    others: waking it, and being woken by it, takes longer than most launches. Nobody waits for a
    launch that still waits for an event. Apart from `close`, all methods are for one launching
    thread.
    """

    def __init__(self, name: str, streams: LaunchStreams) -> None:
        self.streams = streams
        self.block_numbers = BlockNumbers(streams.upload)
        self._ends = CompletionThread(name)
        self._ready_streams = cycle(streams.ready)
        self._recent: list[QueuedLaunch] = []
        self._turns_to_skip = 0

    def choose_stream(self, blocks: Sequence[int], *, is_waiting: bool) -> torch.cuda.Stream:
        """The stream for launches that read these blocks. `is_waiting`: they wait for events.

        Waiting launches of one hand-off share a stream, because its layers are computed one after
        the other. On several streams the same copies slow the step down more.
        """
        if is_waiting:
            return self.streams.waiting[hash(tuple(blocks)) % len(self.streams.waiting)]
        return next(self._ready_streams)

    def add_launch(self, launch: QueuedLaunch) -> None:
        """`pass_on_ends` must follow."""
        self._recent.append(launch)

    def pass_on_ends(self) -> None:
        """Pass on the results of what was launched: those of short launches now.

        After a launch that took long, because others use the device, the thread waits for all
        launches of the next turns.
        """
        begun, waiting = deque[QueuedLaunch](), list[QueuedLaunch]()
        for launch in self._recent:
            (begun if launch.may_have_begun() else waiting).append(launch)
        self._recent = waiting
        if self._turns_to_skip:
            self._turns_to_skip -= bool(begun)
        elif self._ends.is_idle:
            self._finish_short_launches(begun)
        for launch in begun:
            self._ends.put(launch.wait_and_finish)

    def _finish_short_launches(self, launches: deque[QueuedLaunch]) -> None:
        """Take those that end soon off the front."""
        deadline = monotonic_clock() + _BRIEF_SECONDS
        while launches:
            try:
                has_ended = launches[0].ended.query()
            except RuntimeError:
                return  # the thread finds out why
            if has_ended:
                launches.popleft().finish()
            elif monotonic_clock() >= deadline:
                self._turns_to_skip = _TURNS_AFTER_LONG_LAUNCH
                return
            else:
                time.sleep(0)  # a query keeps Python's lock

    def close(self) -> None:
        """Pass on the results of all launches and end the thread."""
        for launch in self._recent:
            self._ends.put(launch.wait_and_finish)
        self._recent.clear()
        self._ends.close()


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
        self._all: list[LaunchSlot] = []  # a launch that has failed may still write to its slot
        self._lock = threading.Lock()

    def take(self, count: int, parts: int) -> LaunchSlot:
        """A slot for a launch over `count` blocks."""
        needed = count * parts
        with self._lock:
            for index, slot in enumerate(self._free):
                if slot.num_words >= needed:
                    return self._free.pop(index)
        made = LaunchSlot(max(_MIN_SLOT_WORDS, 1 << (needed - 1).bit_length()))
        with self._lock:
            self._all.append(made)
        return made

    def give_back(self, slot: LaunchSlot) -> None:
        with self._lock:
            self._free.append(slot)
