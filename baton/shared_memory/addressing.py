"""Block addresses. On the wire a block is (segment, byte offset); inside a process it is one global
index that reaches any segment mapped there: own, pool's and peers', side by side in one reserved
range.

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
    prefault,
    release_addresses,
    reserve_addresses,
    unmap_into_reservation,
    view_memory,
)
from baton.shared_memory.segment import open_peer_segment, round_up_segment_bytes
from baton.types import BlockIndex


@dataclass(frozen=True, slots=True)
class SegmentSpan:
    """A segment's place: global blocks start .. start + blocks."""

    segment: str
    start: int
    num_blocks: int

    @property
    def end(self) -> int:
        return self.start + self.num_blocks


@dataclass(slots=True)
class BlockAddressMap:
    """The arithmetic: which global index is which block of which segment. First fit; a removed span
    leaves a hole that a later segment may fill. `alignment_blocks` blocks is the grain at which
    segments may start."""

    block_bytes: int
    capacity_blocks: int  # blocks
    alignment_blocks: int = 1
    _spans: list[SegmentSpan] = field(default_factory=list)  # by start

    def add_segment(self, segment: str, size: int) -> SegmentSpan:
        """Give `size` bytes of `segment` a span. Raises LayoutMismatch if that is no whole number
        of units of blocks, and ConfigError if the range is full."""
        blocks, rest = divmod(size, self.block_bytes)
        if rest or blocks <= 0 or blocks % self.alignment_blocks:
            raise LayoutMismatch(
                f"segment {segment} has {size} bytes, no multiple of {self.alignment_blocks} x {self.block_bytes}"
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
                f"segment {segment} of {blocks} blocks does not fit in {self.capacity_blocks}: raise the range"
            )
        placed = SegmentSpan(segment, start, blocks)
        bisect.insort(self._spans, placed, key=lambda span: span.start)
        return placed

    def remove_segment(self, segment: str) -> SegmentSpan:
        found = self.get_span(segment)
        self._spans.remove(found)
        return found

    def get_span(self, segment: str) -> SegmentSpan:
        """Raises KeyError for a segment that is not mapped."""
        for span in self._spans:
            if span.segment == segment:
                return span
        raise KeyError(segment)

    def get_block_index(self, segment: str, offset: int) -> BlockIndex:
        """Global index of the block at byte `offset` of a segment. Raises LayoutMismatch unless it
        is a block of it."""
        span = self.get_span(segment)
        block, rest = divmod(offset, self.block_bytes)
        if rest or not 0 <= block < span.num_blocks:
            raise LayoutMismatch(
                f"offset {offset} is no block of segment {segment}, which has {span.num_blocks}"
            )
        return BlockIndex(span.start + block)

    def locate_block(self, index: BlockIndex) -> tuple[str, int]:
        """(segment, byte offset) of a global index. Raises LayoutMismatch where nothing is
        mapped."""
        at = bisect.bisect_right([span.start for span in self._spans], index) - 1
        if at < 0 or index >= self._spans[at].end:
            raise LayoutMismatch(f"no segment is mapped at block {index}")
        span = self._spans[at]
        return span.segment, (index - span.start) * self.block_bytes


class BlockAddressSpace:
    """The mapping itself. Thread-safe. A segment stays mapped, and keeps its indices, for as long
    as its view or anything made over it lives; the reserved range goes with the last of them."""

    def __init__(self, block_bytes: int, folder: Path, range_bytes: int = 256 << 30) -> None:
        """`range_bytes` of addresses are reserved; they cost no memory."""
        grain = round_up_segment_bytes(1, block_bytes)
        self._folder = folder
        self._block_bytes = block_bytes
        capacity = range_bytes // grain * grain
        self.address_map = BlockAddressMap(
            block_bytes, capacity // block_bytes, grain // block_bytes
        )
        self._lock = threading.RLock()  # a garbage collection inside may unmap, on this same thread
        try:
            self.base_address, start, length = reserve_addresses(
                capacity, HUGE_PAGE
            )  # base: address of global block 0
        except OSError as error:
            raise ConfigError(
                f"cannot reserve {capacity} bytes of addresses: {error.strerror} (ulimit -v?)"
            ) from error
        weakref.finalize(self, release_addresses, start, length).atexit = False

    def view_range(self) -> memoryview:
        """The whole range, block 0 first: what is made over it keeps the range reserved. Touching
        it where no segment is mapped is a fault, so whoever does has to know that the segment
        stays."""
        return view_memory(
            self.base_address,
            self.address_map.capacity_blocks * self._block_bytes,
            self._keep_reserved,
        )

    def _keep_reserved(self) -> None:
        """Being referred to by a view's finalizer is what keeps the range."""

    def attach_segment(self, segment: str) -> memoryview:
        """Map a segment of the folder by its name, own or a peer's, and return its memory.

        Raises PeerGone if it is not there and LayoutMismatch if it does not hold whole blocks of
        this size.
        """
        fd, size = open_peer_segment(self._folder, segment)
        with self._lock:
            try:
                address, length = self._address_range(self.address_map.add_segment(segment, size))
                map_file(address, length, fd)
            except OSError as error:
                self.address_map.remove_segment(segment)
                raise PeerUnreachable(
                    f"segment {segment} cannot be mapped: {error.strerror}"
                ) from error
            finally:
                os.close(fd)
        prefault(address, length)
        return view_memory(address, length, lambda: self._unmap_segment(segment))

    def _unmap_segment(self, segment: str) -> None:
        with self._lock:
            unmap_into_reservation(*self._address_range(self.address_map.remove_segment(segment)))

    def _address_range(self, span: SegmentSpan) -> tuple[int, int]:
        return (
            self.base_address + span.start * self._block_bytes,
            span.num_blocks * self._block_bytes,
        )
