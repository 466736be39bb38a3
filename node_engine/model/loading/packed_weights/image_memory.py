"""The memory of a weight image while it is filled, and as nodes read it."""

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash

from baton.errors import ConfigError
from baton.shared_memory.available_memory import (
    format_size,
    insufficient_memory_error,
    measure_available_memory,
    measure_private_memory,
)
from baton.shared_memory.memory_map import (
    HUGE_PAGE,
    collapse_to_huge_pages,
    map_file,
    map_file_for_reading,
    map_private_memory,
    prefault,
    release_addresses,
    reserve_addresses,
    view_memory,
)
from node_engine.model.loading.packed_weights.image_layout import ImageLayout, RegionRecord

_T = TypeVar("_T")
_R = TypeVar("_R")

_PIECE_BYTES = 16 * HUGE_PAGE  # allocated by one call of a thread
_MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class ImageMemory:
    """Mapped memory of an image, as long as `view` or anything made over it lives."""

    address: int
    view: memoryview

    def region_view(self, region: RegionRecord) -> memoryview:
        return self.view[region.offset : region.offset + region.size_bytes]

    def clear(self) -> None:
        ctypes.memset(self.address, 0, len(self.view))


def allocate_private_image(layout: ImageLayout) -> ImageMemory:
    """Allocate memory that only this process has. Raises ConfigError if there is not enough."""
    size, available = layout.segment_bytes, measure_private_memory()
    if size > available.free_bytes:
        raise _private_memory_error(
            layout, f"{format_size(available.free_bytes)} {available.limited_by}"
        )
    address, start, reserved = reserve_addresses(size, HUGE_PAGE)
    try:
        map_private_memory(address, size)
    except OSError as error:
        release_addresses(start, reserved)
        raise _private_memory_error(layout, os.strerror(error.errno or 0)) from error
    return ImageMemory(
        address, view_memory(address, size, lambda: release_addresses(start, reserved))
    )


def _private_memory_error(layout: ImageLayout, cause: str) -> ConfigError:
    return ConfigError(
        f"the packed weights need {layout.segment_bytes} bytes "
        f"({format_size(layout.segment_bytes)}): {cause}: use a smaller model or a larger machine",
        param="model",
    )


def allocate_file_image(folder: Path, fd: int, layout: ImageLayout, knob: str) -> ImageMemory:
    """Allocate and map the memory of a segment of `folder` whose size is set.

    Every byte is allocated here, so that no later store can fail. Raises OSError if the folder is
    full, and ConfigError, naming `knob`, if other programs have used the memory meanwhile.
    """
    size = layout.segment_bytes
    address, start, reserved = reserve_addresses(size, HUGE_PAGE)

    def allocate_piece(piece: range) -> None:
        room = measure_available_memory(folder)
        if len(piece) > room.free_bytes - room.reserve_bytes // 2:
            raise insufficient_memory_error(folder, size, room, knob)
        _allocate_piece(fd, address, piece)

    try:
        map_file(address, size, fd)
        run_on_threads(allocate_piece, split_into_pieces(size))
    except BaseException:
        release_addresses(start, reserved)
        raise
    return ImageMemory(
        address, view_memory(address, size, lambda: release_addresses(start, reserved))
    )


def _allocate_piece(fd: int, address: int, piece: range) -> None:
    # To collapse a huge page with one small page in it is several times faster than a full one.
    for offset in piece[::HUGE_PAGE]:
        os.pwrite(fd, b"\0", offset)
    collapse_to_huge_pages(address + piece.start, len(piece))
    os.posix_fallocate(fd, piece.start, len(piece))
    prefault(address + piece.start, len(piece))


def map_image_for_reading(
    fd: int, layout: ImageLayout, when_unused: Callable[[], None]
) -> ImageMemory:
    """Map a complete image read-only. Raises OSError.

    `when_unused` is called once nothing uses the memory.
    """
    size = layout.segment_bytes
    address, start, reserved = reserve_addresses(size, HUGE_PAGE)
    try:
        map_file_for_reading(address, size, fd)
    except OSError:
        release_addresses(start, reserved)
        raise

    def unmap() -> None:
        release_addresses(start, reserved)
        when_unused()

    return ImageMemory(address, view_memory(address, size, unmap))


def split_into_pieces(size: int, piece_bytes: int = _PIECE_BYTES) -> list[range]:
    return [range(at, min(at + piece_bytes, size)) for at in range(0, size, piece_bytes)]


def compute_checksums(memory: ImageMemory, regions: Iterable[RegionRecord]) -> dict[str, str]:
    """XXH3-64 of each region, on several threads, the largest regions first."""
    by_size = sorted(regions, key=lambda region: -region.size_bytes)
    checksums = run_on_threads(
        lambda region: xxhash.xxh3_64_hexdigest(memory.region_view(region)), by_size
    )
    return {region.name: value for region, value in zip(by_size, checksums, strict=True)}


def run_on_threads(work: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """Results of `work` for all items. The calls have to release Python's lock to run at once."""
    threads = max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)), len(items)))
    with ThreadPoolExecutor(threads, thread_name_prefix="packed-weights") as pool:
        return list(pool.map(work, items))
