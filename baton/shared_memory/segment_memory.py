"""Allocates the memory of a segment in pieces, from its beginning on.

A store to a page that a full tmpfs cannot provide raises SIGBUS instead of an error. Memory is
therefore allocated before it is used, and never by its first use. A process may serve while the
rest of a segment is still being allocated, as long as it uses only the part that has memory.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from baton.errors import ShuttingDown
from baton.shared_memory.available_memory import insufficient_memory_error, measure_available_memory
from baton.shared_memory.memory_map import HUGE_PAGE, collapse_to_huge_pages, prefault

# Allocated between two measurements of the available memory. A thread that needs memory at once
# waits for at most one piece of another thread.
_PIECE_BYTES = 8 * HUGE_PAGE


class SegmentMemory:
    """The memory of a segment, allocated up to `allocated_bytes`. Thread-safe."""

    def __init__(self, folder: Path, fd: int, address: int, size_bytes: int, knob: str) -> None:
        """`fd` is the segment's file, `address` its mapping; `knob` is named in errors."""
        self.allocated_bytes = 0  # from the beginning of the segment; it only grows
        self.max_bytes = size_bytes  # how far it can grow; lowered by `give_up_rest`
        self.has_huge_pages = True  # whether all memory that is allocated is in huge pages
        self._folder = folder
        self._fd = fd
        self._address = address
        self._knob = knob
        self._lock = threading.Lock()

    def allocate_until(self, end: int, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Allocate and pre-fault the segment up to byte `end`, or to its end if that is less.

        Raises ConfigError if other programs have used the memory that was reserved for it, OSError
        if the folder refuses it, and ShuttingDown once `is_wanted()` is false.
        """
        while self.allocated_bytes < min(end, self.max_bytes):
            if not is_wanted():
                raise ShuttingDown("the process stops while it allocates memory")
            with self._lock:
                first = self.allocated_bytes
                piece = range(first, min(first + _PIECE_BYTES, self.max_bytes))
                if piece and first < end:  # another thread may have allocated it
                    self._allocate_piece(piece)
                    self.allocated_bytes = piece.stop

    def give_up_rest(self, unit_bytes: int) -> None:
        """Allocate nothing more, and end the reservation of what has no memory.

        The segment keeps a multiple of `unit_bytes`, so that peers can still map it.
        """
        with self._lock:
            if self.allocated_bytes < self.max_bytes:
                self.max_bytes = self.allocated_bytes
                os.ftruncate(self._fd, -(-self.max_bytes // unit_bytes) * unit_bytes)

    def _allocate_piece(self, piece: range) -> None:
        available = measure_available_memory(self._folder)
        if len(piece) > available.free_bytes - available.reserve_bytes // 2:
            size = os.fstat(self._fd).st_size
            raise insufficient_memory_error(self._folder, size, available, self._knob)
        start = self._address + piece.start
        _touch_huge_pages(self._fd, piece)
        self.has_huge_pages &= collapse_to_huge_pages(start, len(piece))
        os.posix_fallocate(self._fd, piece.start, len(piece))
        prefault(start, len(piece))


def prefault_allocated(address: int, fd: int, size: int) -> None:
    """Fill the page table for the parts of a mapped file that have memory.

    `address` is the mapping of its first `size` bytes. The other parts get no memory by this.
    """
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError:  # no data behind `end`
            return
        end = min(size, os.lseek(fd, start, os.SEEK_HOLE))
        if start < end:
            prefault(address + start, end - start)


def _touch_huge_pages(fd: int, piece: range) -> None:
    """Allocate one small page in each huge page.

    Collapsing then copies one page instead of 512, which was measured to be 7 times faster.
    """
    for offset in piece[::HUGE_PAGE]:
        os.pwrite(fd, b"\0", offset)
