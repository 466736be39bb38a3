"""Packed weights, packed once: in memory that all nodes of a host share, and in a cache file.

`PackedWeightStore.open_or_build` finds a model's packed weights in the first of three places: the
segment that another node of this host keeps, the file in the user's cache folder, or else it packs
them. Whatever prevents sharing or caching (a full folder, a damaged file, files of other users) is
said in the log once, and the node computes with memory of its own.
docs/design/0015-packed-weights.md has the reasoning.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from baton.process import log
from baton.shared_memory.memory_map import measure_huge_page_share
from node_engine.model.loading.packed_weights.cache_folder import (
    ImageFileDamaged,
    WeightCacheFolder,
)
from node_engine.model.loading.packed_weights.image_layout import (
    ImageLayout,
    PackedWeightsKey,
    RegionSpec,
    plan_image,
)
from node_engine.model.loading.packed_weights.image_memory import (
    ImageMemory,
    allocate_private_image,
    compute_checksums,
)
from node_engine.model.loading.packed_weights.progress import show_progress
from node_engine.model.loading.packed_weights.shared_image import (
    SharedImage,
    SharedImageUnavailable,
)

FillRegion = Callable[[str, memoryview], None]  # region name, zeroed memory of its exact size
_FillImage = Callable[[ImageLayout, ImageMemory], "_FilledImage"]
ImageSource = Literal["segment", "cache file", "checkpoint"]

_PATIENCE_SECONDS = 300.0  # that a node waits for another one that packs
_MAX_ATTEMPTS = 100


@dataclass(frozen=True, slots=True)
class PackedRegion:
    """The memory of one region. It stays mapped as long as `buffer` or anything over it lives."""

    address: int
    # Bytes. Formally writable, as torch.frombuffer expects; a store to shared memory is a fault.
    buffer: memoryview

    @property
    def view(self) -> memoryview:
        return self.buffer.toreadonly()


@dataclass(frozen=True)
class PackedWeights:
    """The packed weights of a model, by region."""

    regions: Mapping[str, PackedRegion]
    image_id: str
    image_bytes: int
    source: ImageSource  # where they were found
    is_shared: bool  # whether other nodes of this host can use the same memory
    huge_page_share: float  # of the image's memory, as this process maps it: 0 to 1
    seconds: float  # that `open_or_build` took
    cache_writer: threading.Thread | None = None  # writes the cache file meanwhile


class PackedWeightStore:
    """Opens and builds images of packed weights."""

    def __init__(
        self,
        segment_folder: Path,
        cache: WeightCacheFolder | None,
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> None:
        """`segment_folder` is a tmpfs folder. Without a `cache` nothing is written to disk."""
        self._segment_folder = segment_folder
        self._cache = cache
        self._patience_seconds = patience_seconds
        self._early: _EarlyOpening | None = None

    def begin_opening(self, image_id: str) -> None:
        """Open an image on a thread, if it is in a segment or a cache file.

        Not if another process fills it just now. The next `open_or_build` waits for the image, and
        uses it if it is the right one; call that or `cancel_opening`.
        """
        self._early = _EarlyOpening(image_id, self._open_packed)

    def cancel_opening(self) -> None:
        """Stop what `begin_opening` began, and release it. Idempotent.

        Waits for a piece that is being read, or for the memory that is being allocated.
        """
        early, self._early = self._early, None
        if early is not None:
            early.cancel()

    def open_or_build(
        self, key: PackedWeightsKey, specs: Sequence[RegionSpec], fill: FillRegion
    ) -> PackedWeights:
        """Return the weights of `key`, by `fill` of each region in turn if they are nowhere.

        Raises ConfigError if the memory is insufficient, ValueError for regions that cannot be
        placed, and what `fill` raises; then nothing is left behind.
        """
        started = time.monotonic()
        layout = plan_image(key, specs)
        opened = self._take_early(layout) or self._open_or_build(layout, partial(self._fill, fill))
        weights = _make_weights(layout, opened, time.monotonic() - started)
        log.get_logger("engine").info(
            "packed weights ready",
            source=weights.source,
            shared=weights.is_shared,
            bytes=weights.image_bytes,
            huge_page_share=round(weights.huge_page_share, 3),
            seconds=round(weights.seconds, 3),
        )
        return weights

    def _take_early(self, layout: ImageLayout) -> "_OpenedImage | None":
        """What `begin_opening` has opened, if it has this layout. Another image is released."""
        early, self._early = self._early, None
        if early is None:
            return None
        if early.image_id != layout.image_id:
            early.cancel()
            return None
        opened = early.finish()
        return opened if opened is not None and opened.layout == layout else None

    def _open_packed(
        self, image_id: str, check_cancelled: Callable[[], None]
    ) -> "_OpenedImage | None":
        layout = self._cache.find_layout(image_id) if self._cache is not None else None
        if layout is None:
            return None

        def read_image(layout: ImageLayout, memory: ImageMemory) -> _FilledImage:
            filled = self._read_from_cache(layout, memory, check_cancelled)
            if filled is None:
                raise _NotPackedError
            return filled

        try:
            return self._open_shared(layout, read_image, patience_seconds=0.0)
        except (SharedImageUnavailable, _NotPackedError):
            return None  # `open_or_build` tries again, and says why if it cannot

    def _open_or_build(self, layout: ImageLayout, fill_image: _FillImage) -> "_OpenedImage":
        try:
            return self._open_shared(layout, fill_image, self._patience_seconds)
        except SharedImageUnavailable as reason:
            log.get_logger("engine").warning(
                "packed weights are not shared with other nodes of this host", reason=str(reason)
            )
            return self._build_private(layout, fill_image)

    def _open_shared(
        self, layout: ImageLayout, fill_image: _FillImage, patience_seconds: float
    ) -> "_OpenedImage":
        for _ in range(_MAX_ATTEMPTS):
            image = SharedImage(self._segment_folder, layout)
            try:
                image.lock_for_filling(patience_seconds)
                if not image.is_linked():
                    continue
                if image.is_complete():
                    memory = image.map_for_reading()
                    image.unlock_for_others()
                    return _OpenedImage(layout, memory, "segment", is_shared=True)
                if image.is_empty():
                    return self._fill_shared(image, layout, fill_image)
                image.remove()  # a process died while it filled this file
            finally:
                if not image.is_mapped:
                    image.release()
        raise SharedImageUnavailable("its segment is removed again and again")

    def _fill_shared(
        self, image: SharedImage, layout: ImageLayout, fill_image: _FillImage
    ) -> "_OpenedImage":
        try:
            filled = fill_image(layout, image.allocate())
            image.mark_complete(filled.header)
        except BaseException:
            image.remove()
            raise
        memory = image.map_for_reading()
        image.unlock_for_others()
        return _OpenedImage(
            layout, memory, filled.source, is_shared=True, cache_writer=self._save(filled, memory)
        )

    def _build_private(self, layout: ImageLayout, fill_image: _FillImage) -> "_OpenedImage":
        memory = allocate_private_image(layout)
        filled = fill_image(layout, memory)
        return _OpenedImage(
            layout, memory, filled.source, is_shared=False, cache_writer=self._save(filled, memory)
        )

    def _fill(self, fill: FillRegion, layout: ImageLayout, memory: ImageMemory) -> "_FilledImage":
        filled = self._read_from_cache(layout, memory)
        if filled is not None:
            return filled
        with show_progress("packing weights", layout.image_bytes) as advance:
            for region in layout.regions:
                fill(region.name, memory.region_view(region))
                advance(region.size_bytes)
        header = layout.encode_header(compute_checksums(memory, layout.regions))
        return _FilledImage(layout, header, "checkpoint")

    def _read_from_cache(
        self,
        layout: ImageLayout,
        memory: ImageMemory,
        check_cancelled: Callable[[], None] = lambda: None,
    ) -> "_FilledImage | None":
        if self._cache is None:
            return None
        try:
            with show_progress("reading packed weights", layout.image_bytes) as advance:

                def on_read(num_bytes: int) -> None:
                    check_cancelled()
                    advance(num_bytes)

                checksums = self._cache.load_image(layout, memory, on_read)
        except ImageFileDamaged as reason:
            log.get_logger("engine").warning(
                "a cache file of packed weights cannot be used and is removed",
                file=str(self._cache.image_path(layout)),
                reason=str(reason),
            )
            self._cache.remove_image(layout)
            memory.clear()
            return None
        if checksums is None:
            return None
        return _FilledImage(layout, layout.encode_header(checksums), "cache file")

    def _save(self, filled: "_FilledImage", memory: ImageMemory) -> threading.Thread | None:
        """Write the cache file on a thread, if the weights did not come from there."""
        if self._cache is None or filled.source != "checkpoint":
            return None
        # Not a daemon: a process that ends early finishes the file first.
        writer = threading.Thread(
            target=self._cache.save_image,
            args=(filled.layout, filled.header, memory),
            name="weight-cache-writer",
        )
        writer.start()
        return writer


@dataclass(frozen=True, slots=True)
class _FilledImage:
    layout: ImageLayout
    header: bytes
    source: ImageSource


@dataclass(frozen=True, slots=True)
class _OpenedImage:
    layout: ImageLayout
    memory: ImageMemory
    source: ImageSource
    is_shared: bool
    cache_writer: threading.Thread | None = None


class _NotPackedError(Exception):
    """An image is neither in a segment nor in a cache file."""


class _OpeningCancelledError(Exception):
    """Nobody needs the image."""


_OpenImage = Callable[[str, Callable[[], None]], _OpenedImage | None]


class _EarlyOpening:
    """An image that a thread of its own opens."""

    def __init__(self, image_id: str, open_image: _OpenImage) -> None:
        """`open_image` gets the id, and what raises when nobody needs the image any more."""
        self.image_id = image_id
        self._open_image = open_image
        self._is_cancelled = False
        self._opened: _OpenedImage | None = None
        self._thread = threading.Thread(target=self._run, name="packed-weights")
        self._thread.start()

    def finish(self) -> _OpenedImage | None:
        """Wait for the result. None also if the call has failed, which is logged."""
        self._thread.join()
        opened, self._opened = self._opened, None
        return opened

    def cancel(self) -> None:
        """Stop after the piece that is being read, and release the image."""
        self._is_cancelled = True
        self.finish()

    def _check_cancelled(self) -> None:
        if self._is_cancelled:
            raise _OpeningCancelledError

    def _run(self) -> None:
        try:
            self._opened = self._open_image(self.image_id, self._check_cancelled)
        except _OpeningCancelledError:
            pass
        except Exception as error:  # whatever it is: open_or_build tries again, and raises it
            log.get_logger("engine").warning(
                "packed weights are not read before they are needed", **log.get_error_fields(error)
            )


def _make_weights(layout: ImageLayout, opened: _OpenedImage, seconds: float) -> PackedWeights:
    memory = opened.memory
    return PackedWeights(
        {
            region.name: PackedRegion(memory.address + region.offset, memory.region_view(region))
            for region in layout.regions
        },
        layout.image_id,
        layout.image_bytes,
        opened.source,
        opened.is_shared,
        measure_huge_page_share(memory.address, layout.segment_bytes),
        seconds,
        opened.cache_writer,
    )
