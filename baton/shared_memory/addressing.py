"""Block addresses: (segment, byte offset) on the wire, one global index inside a process.

A process maps its own segment, the pool's and its peers' side by side in one reserved address
range, so that one index reaches a block of any of them.

    address  base            base + span[1].start * block_bytes
             |-- own arena --|-- pool --|-- peer A --|-- (free) ...
    index    0               n          n + m
"""

import bisect
import os
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path

from baton.errors import ConfigError, LayoutMismatch, PeerUnreachable
from baton.shared_memory.memory_map import (
    HUGE_PAGE,
    map_file,
    release_addresses,
    reserve_addresses,
    unmap_into_reservation,
    view_memory,
)
from baton.shared_memory.segment import open_peer_segment, round_up_segment_bytes
from baton.shared_memory.segment_memory import prefault_allocated
from baton.types import BlockIndex


@dataclass(frozen=True, slots=True)
class SegmentSpan:
    """The range of global block indices that a segment has."""

    segment: str  # file name in the segment folder
    start: int  # global index of the first block
    num_blocks: int

    @property
    def end(self) -> int:
        return self.start + self.num_blocks


@dataclass(slots=True)
class BlockAddressMap:
    """Maps global block indices to blocks of segments, and back. Does not map memory.

    Spans are allocated first fit. A removed span leaves a hole that a later segment may fill.
    """

    block_bytes: int
    capacity_blocks: int
    alignment_blocks: int = 1  # segments have, and start at, a multiple of so many blocks
    _spans: list[SegmentSpan] = field(default_factory=list)  # by start

    def add_segment(self, segment: str, size: int) -> SegmentSpan:
        """Allocate a span for a segment of `size` bytes.

        Raises LayoutMismatch unless the size is a multiple of `alignment_blocks` blocks,
        ConfigError if the range is full, and ValueError if the segment has a span already.
        """
        blocks, remainder = divmod(size, self.block_bytes)
        if remainder or blocks <= 0 or blocks % self.alignment_blocks:
            raise LayoutMismatch(
                f"segment {segment} has {size} bytes, "
                f"not a multiple of {self.alignment_blocks} x {self.block_bytes}"
            )
        if any(span.segment == segment for span in self._spans):
            raise ValueError(f"segment {segment} is mapped already")
        start = 0
        for span in self._spans:
            if span.start - start >= blocks:
                break
            start = span.end
        if start + blocks > self.capacity_blocks:
            raise ConfigError(
                f"segment {segment} of {blocks} blocks does not fit "
                f"in {self.capacity_blocks}: raise the range"
            )
        placed = SegmentSpan(segment, start, blocks)
        bisect.insort(self._spans, placed, key=lambda span: span.start)
        return placed

    def remove_segment(self, segment: str) -> SegmentSpan:
        found = self.get_span(segment)
        self._spans.remove(found)
        return found

    def get_span(self, segment: str) -> SegmentSpan:
        """Return the span of a segment. Raises KeyError for a segment without one."""
        for span in self._spans:
            if span.segment == segment:
                return span
        raise KeyError(segment)

    def get_block_index(self, segment: str, offset: int) -> BlockIndex:
        """Return the global index of the block at byte `offset` of a segment.

        Raises LayoutMismatch unless a block of the segment begins there.
        """
        span = self.get_span(segment)
        block, remainder = divmod(offset, self.block_bytes)
        if remainder or not 0 <= block < span.num_blocks:
            raise LayoutMismatch(
                f"offset {offset} is not a block of segment {segment}, which has {span.num_blocks}"
            )
        return BlockIndex(span.start + block)

    def locate_block(self, index: BlockIndex) -> tuple[str, int]:
        """Return (segment, byte offset) of a global index. Raises LayoutMismatch if it is free."""
        place = bisect.bisect_right([span.start for span in self._spans], index) - 1
        if place < 0 or index >= self._spans[place].end:
            raise LayoutMismatch(f"no segment is mapped at block {index}")
        span = self._spans[place]
        return span.segment, (index - span.start) * self.block_bytes


class BlockAddressSpace:
    """Maps segments into one reserved address range. Thread-safe.

    A segment stays mapped, and keeps its indices, as long as its view or anything made over it
    lives. The range is released after the last of them.
    """

    def __init__(self, block_bytes: int, folder: Path, range_bytes: int = 256 << 30) -> None:
        """Reserve `range_bytes` of addresses, which cost no memory. Raises ConfigError."""
        grain = round_up_segment_bytes(1, block_bytes)
        self._folder = folder
        self._block_bytes = block_bytes
        capacity = range_bytes // grain * grain
        self.address_map = BlockAddressMap(
            block_bytes, capacity // block_bytes, grain // block_bytes
        )
        self._lock = threading.RLock()  # reentrant: a garbage collection may unmap on this thread
        try:
            # The base address is that of global block 0.
            self.base_address, start, length = reserve_addresses(capacity, HUGE_PAGE)
        except OSError as error:
            raise ConfigError(
                f"cannot reserve {capacity} bytes of addresses: {error.strerror} (ulimit -v?)"
            ) from error
        weakref.finalize(self, release_addresses, start, length).atexit = False

    def view_range(self) -> memoryview:
        """Return a view of the whole range, from block 0 on, which keeps the range reserved.

        Access where no segment is mapped is a fault, so the caller must ensure that the segments it
        reads stay mapped.
        """
        return view_memory(
            self.base_address,
            self.address_map.capacity_blocks * self._block_bytes,
            self._keep_reserved,
        )

    def _keep_reserved(self) -> None:
        """Do nothing: the finalizer of a view refers to this method, which keeps `self` alive."""

    def attach_segment(self, segment: str) -> memoryview:
        """Map a segment of the folder by its name, own or a peer's, and return its memory.

        Raises PeerUnreachable if it cannot be opened or mapped, and LayoutMismatch if it does not
        hold whole blocks of this size.
        """
        fd, size = open_peer_segment(self._folder, segment)
        try:
            with self._lock:
                address, length = self._map_segment(segment, size, fd)
            prefault_allocated(address, fd, length)
        finally:
            os.close(fd)
        return view_memory(address, length, lambda: self._unmap_segment(segment))

    def _map_segment(self, segment: str, size: int, fd: int) -> tuple[int, int]:
        """Map the file of a segment. Returns (address, length)."""
        address, length = self._address_range(self.address_map.add_segment(segment, size))
        try:
            map_file(address, length, fd)
        except OSError as error:
            self.address_map.remove_segment(segment)
            raise PeerUnreachable(
                f"segment {segment} cannot be mapped: {error.strerror}"
            ) from error
        return address, length

    def _unmap_segment(self, segment: str) -> None:
        with self._lock:
            unmap_into_reservation(*self._address_range(self.address_map.remove_segment(segment)))

    def _address_range(self, span: SegmentSpan) -> tuple[int, int]:
        return (
            self.base_address + span.start * self._block_bytes,
            span.num_blocks * self._block_bytes,
        )
