"""Memory calls that Python's mmap module lacks: reserve a range, map at an address, huge pages.

Addresses are plain integers. Linux only.
"""

import ctypes
import errno
import os
import weakref
from collections.abc import Callable
from pathlib import Path

HUGE_PAGE = 2 << 20

_PROT_NONE, _PROT_READ, _PROT_READ_WRITE = 0, 1, 3
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = (
    0x01,
    0x02,
    0x10,
    0x20,
    0x4000,
)
_MADV_HUGEPAGE, _MADV_POPULATE_READ, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 14, 22, 23, 25
_HUGE_PAGE_FIELDS = ("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:")  # of smaps, in kB
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _mmap(address: int | None, length: int, protection: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, length, protection, flags, fd, 0)
    if found is None or found == _MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"mmap of {length} bytes: {os.strerror(error)}")
    return int(found)


def reserve_addresses(length: int, alignment: int) -> tuple[int, int, int]:
    """Reserve address space without memory behind it.

    Returns (first address that is a multiple of `alignment`, start of the reservation, its length).
    The last two are for `release_addresses`.
    """
    reserved = length + alignment
    start = _mmap(None, reserved, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    return -(-start // alignment) * alignment, start, reserved


def release_addresses(start: int, length: int) -> None:
    if _libc.munmap(start, length) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"munmap of {length} bytes: {os.strerror(error)}")


def map_file(address: int, length: int, fd: int) -> None:
    """Map the first `length` bytes of a file, shared and writable, inside a reservation."""
    _mmap(address, length, _PROT_READ_WRITE, _MAP_SHARED | _MAP_FIXED, fd)


def map_file_for_reading(address: int, length: int, fd: int) -> None:
    """Map a file as `map_file` does, read-only, and fill the page table. A store is a fault."""
    _mmap(address, length, _PROT_READ, _MAP_SHARED | _MAP_FIXED, fd)
    _libc.madvise(address, length, _MADV_POPULATE_READ)  # before Linux 5.14: at the first use


def map_private_memory(address: int, length: int) -> None:
    """Allocate zeroed memory of this process inside a reservation, in huge pages if possible.

    Raises OSError if the kernel has not enough.
    """
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_FIXED
    _mmap(address, length, _PROT_READ_WRITE, flags, -1)
    _libc.madvise(address, length, _MADV_HUGEPAGE)
    if not prefault(address, length) and ctypes.get_errno() == errno.ENOMEM:
        raise OSError(errno.ENOMEM, f"{length} bytes: {os.strerror(errno.ENOMEM)}")


def unmap_into_reservation(address: int, length: int) -> None:
    """Unmap a part of a reservation and keep it reserved. Access to it is a fault again."""
    _mmap(
        address,
        length,
        _PROT_NONE,
        _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED,
        -1,
    )


def collapse_to_huge_pages(address: int, length: int) -> bool:
    """Ask the kernel for huge pages now. Returns whether it could.

    It cannot before Linux 6.1, or without contiguous free memory. Access is then only slower.
    """
    return bool(_libc.madvise(address, length, _MADV_COLLAPSE) == 0)


def prefault(address: int, length: int) -> bool:
    """Fill the page table for writing. Returns False before Linux 5.14.

    Pages are then faulted in at their first use.
    """
    return bool(_libc.madvise(address, length, _MADV_POPULATE_WRITE) == 0)


def view_memory(address: int, length: int, when_unused: Callable[[], None]) -> memoryview:
    """Return a writable byte view of mapped memory.

    `when_unused` is called, on any thread, once the view and everything made over it (arrays,
    tensors, other views) is deleted. Only then may the memory be unmapped.
    """
    memory = (ctypes.c_char * length).from_address(address)
    weakref.finalize(memory, when_unused).atexit = False
    return memoryview(memory).cast("B")


def measure_huge_page_share(
    address: int, length: int, smaps: Path = Path("/proc/self/smaps")
) -> float:
    """Return the share of mapped memory that this process accesses by huge pages, from 0 to 1.

    `smaps` is a file in which the kernel describes the mappings. It is 0 if that cannot be read.
    """
    huge_bytes, is_inside = 0, False
    try:
        lines = smaps.read_text().splitlines()
    except OSError:
        return 0.0
    for line in lines:
        first, *values = line.split()
        if not first.endswith(":"):  # the addresses of the next mapping
            start, end = (int(part, 16) for part in first.split("-"))
            is_inside = address <= start and end <= address + length
        elif is_inside and first in _HUGE_PAGE_FIELDS:
            huge_bytes += int(values[0]) << 10
    return huge_bytes / length
