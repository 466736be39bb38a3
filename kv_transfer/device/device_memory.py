"""The memory in which a node computes, as its transfer plane sees it.

    this node's arena       TransferDevice      cuda_memory.py, host_memory.py
    a peer's arena          PeerMemory        opened from an ArenaExport

Work is queued and ends later: its result is passed to a callback, on a thread of the
implementation. Slabs are named as in a hand-off: some layers of some blocks.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from baton.errors import HandoffFailed
from baton.kv.device_event import DeviceEvent
from kv_transfer.core.slabs import SlabRange


class DeviceFailed(HandoffFailed):
    """The device failed: what it still writes is unknown until its process has ended."""


class ArenaExport(msgspec.Struct, frozen=True):
    """How another process of this host opens an arena. Plain data, in a file."""

    kind: str  # of TransferDevice: cuda or host
    device: str  # identity of the device that has the memory
    pid: int  # of the owner
    address: int  # in the owner
    handle: str  # hexadecimal, of the allocation that the arena lies in; of host: the segment
    offset: int  # of the arena in the allocation
    num_blocks: int
    num_layers: int
    slab_bytes: int


# The checksum of what was copied or checked, or why it could not be.
OnChecksum = Callable[[int | DeviceFailed], None]
# The slabs in host memory, layer-major, or why they could not be read.
OnPayload = Callable[[memoryview | DeviceFailed], None]


class QueuedWork(Protocol):
    """What a device computes at this moment."""

    def has_ended(self) -> bool:
        """Raises DeviceFailed."""
        ...


class PeerMemory(Protocol):
    """A peer's arena, opened."""

    def write_slabs(
        self,
        slab_range: SlabRange,
        source: Sequence[int],  # blocks of the own arena
        target: Sequence[int],  # blocks of the peer's, as many
        on_done: OnChecksum,
        *,
        after: Sequence[DeviceEvent] = (),
        corrupt: bool = False,
    ) -> None:
        """Copy slabs into the peer's arena; the checksum is that of what was read.

        With events, one for each layer, a layer is read after its event. `corrupt` changes one bit
        of what is written, for tests. Raises DeviceFailed.
        """
        ...

    def close(self) -> None:
        """Unmap the arena. Nothing is being written to it."""
        ...


class TransferDevice(Protocol):
    """This node's arena, on one device."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def writer_name(self) -> str:
        """The file by which peers prove the end of this process; empty: it may not write."""
        ...

    @property
    def driver_file(self) -> Path:
        """Path of the driver's device file, such as /dev/nvidia0.

        Each process that writes to this memory holds a lock on the file, so that its end can be
        proven; see ProvableWriter.
        """
        ...

    @property
    def receives(self) -> bool:
        """Whether peers may write to this memory: the end of a killed one is proven here."""
        ...

    def export_arena(self) -> ArenaExport:
        """Raises UnmappableSegment if other processes cannot open the arena."""
        ...

    def open_peer(self, export: ArenaExport) -> PeerMemory:
        """Raises UnmappableSegment if this process cannot write to that arena."""
        ...

    def can_open(self, export_device: str) -> bool:
        """Whether a device can write to memory of the device with that identity."""
        ...

    def mark_queued_work(self, blocks: Sequence[int]) -> QueuedWork:
        """What is queued by the calling thread, which computes in this memory.

        Nothing else of this node changes these blocks, until the thread uses them again.
        """
        ...

    def check_slabs(
        self,
        slab_range: SlabRange,
        blocks: Sequence[int],
        on_done: OnChecksum,
        *,
        corrupt: bool = False,
    ) -> None:
        """Compute the checksum of slabs where they are.

        `corrupt` changes one bit of them before, for tests. Raises DeviceFailed.
        """
        ...

    def read_slabs(
        self,
        slab_range: SlabRange,
        blocks: Sequence[int],
        on_done: OnPayload,
        *,
        after: Sequence[DeviceEvent] = (),
    ) -> None:
        """Copy slabs of one layer to host memory, after its event. Raises DeviceFailed."""
        ...

    def pass_on_ends(self, *, of_checks: bool) -> None:
        """Pass on the results of queued checks, or of writes and reads, at once or later.

        Must be called after queueing such work, and again once the event that it was queued behind
        has passed, by the thread that queues it: a node that has changed its role checks on one
        thread and writes on another. Takes a fraction of a millisecond at most.
        """
        ...

    def close(self) -> None:
        """Wait for queued work of this object, and end its threads."""
        ...


def combine_checksums(sums: npt.NDArray[np.uint64]) -> int:
    """The checksum of a Write: a hash of the checksums of its blocks, in their order."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(sums).tobytes())
