"""Image files in the user's cache folder, which fill the memory of an image at the next start.

A file is written under another name and renamed when it is complete. It is read with system calls,
because a page of a mapped file that a disk cannot deliver kills the process. Every region's
checksum is verified before the image is used. Files are private to this user: those of other users,
or that others can write, are not read.
"""

import fcntl
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from baton.models.weight_cache import (
    IMAGE_FILE_SUFFIX,
    WeightCacheSettings,
    invalid_folder_error,
    require_private_folder,
)
from baton.process import log
from node_engine.model.loading.packed_weights.image_layout import (
    PREFIX_BYTES,
    ImageLayout,
    count_header_bytes,
    read_layout,
)
from node_engine.model.loading.packed_weights.image_memory import (
    ImageMemory,
    compute_checksums,
    run_on_threads,
    split_into_pieces,
)

_IMAGE_FILE = re.compile(r"[0-9a-f]{32}\.weights")
_UNFINISHED_FILE = re.compile(r"\.[0-9a-f]{32}\.unfinished")
_READ_BYTES = 16 << 20


class ImageFileDamaged(Exception):
    """A cache file exists and cannot be used. The message says why."""


class WeightCacheFolder:
    """The image files of one folder, bounded in their total size."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """The folder is created if it does not exist. Raises OSError if it cannot be used."""
        require_private_folder(folder)
        self.folder = folder
        self.max_bytes = max_bytes

    def image_path(self, layout: ImageLayout) -> Path:
        return self._name_path(layout.image_id)

    def find_layout(self, image_id: str) -> ImageLayout | None:
        """The layout of an image, as its file describes it; None if no file can be used."""
        try:
            with os.fdopen(_open_unfollowed(self._name_path(image_id)), "rb") as file:
                found = os.fstat(file.fileno())
                _require_private_file(found)
                prefix = file.read(PREFIX_BYTES)
                rest = file.read(count_header_bytes(prefix) - len(prefix))
                layout = read_layout(prefix + rest, found.st_size)
        except (OSError, ValueError):
            return None
        return layout if layout.image_id == image_id else None

    def _name_path(self, image_id: str) -> Path:
        return self.folder / f"{image_id}{IMAGE_FILE_SUFFIX}"

    def load_image(
        self, layout: ImageLayout, memory: ImageMemory, on_read: Callable[[int], None]
    ) -> dict[str, str] | None:
        """Fill the memory from the image's file. Returns the regions' checksums; None: no file.

        `on_read` gets the number of bytes of each piece that was read, on any thread. Raises
        ImageFileDamaged, with anything in the memory.
        """
        try:
            fd = _open_unfollowed(self.image_path(layout))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ImageFileDamaged(error.strerror) from error
        try:
            checksums = _check_file(fd, layout)
            _read_regions(fd, layout, memory, on_read)
            with suppress(OSError):  # on a read-only folder
                os.utime(fd)  # the last use, by which files are evicted
        except (OSError, ValueError) as error:
            raise ImageFileDamaged(str(error)) from error
        finally:
            os.close(fd)
        found = compute_checksums(memory, layout.regions)
        damaged = [name for name in checksums if found[name] != checksums[name]]
        if damaged:
            raise ImageFileDamaged(
                f"the checksum of {len(damaged)} regions differs, first {damaged[0]}"
            )
        return checksums

    def save_image(self, layout: ImageLayout, header: bytes, memory: ImageMemory) -> bool:
        """Write the image's file, and evict the least recently used ones beyond the bound.

        Returns whether it was written; if not, the log says why.
        """
        logger = log.get_logger("engine")
        if layout.image_bytes > self.max_bytes:
            logger.warning(
                "packed weights are not cached: they are larger than --weight-cache-size",
                bytes=layout.image_bytes,
                bound=self.max_bytes,
            )
            return False
        path = self.folder / f".{secrets.token_hex(16)}.unfinished"
        fd = -1
        try:
            with lock_cache_folder(self.folder):
                self._remove_unfinished()
                self._evict(self.max_bytes - layout.image_bytes, keep=self.image_path(layout))
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
                fcntl.flock(fd, fcntl.LOCK_EX)
            os.posix_fallocate(fd, 0, layout.image_bytes)  # a full disk is found before the write
            _write_all(fd, header, 0)
            _write_all(fd, memory.view[len(header) : layout.image_bytes], len(header))
            path.replace(self.image_path(layout))
        except OSError as error:
            with suppress(OSError):  # a read-only file system refuses this, too
                path.unlink()
            logger.warning(
                "packed weights are not cached, so the next start packs them again",
                folder=str(self.folder),
                error=error.strerror,
            )
            return False
        finally:
            if fd >= 0:
                os.close(fd)
        return True

    def remove_image(self, layout: ImageLayout) -> None:
        with suppress(OSError):
            self.image_path(layout).unlink()

    def list_images(self) -> list["CachedImageFile"]:
        """This user's image files, the least recently used first."""
        found = []
        for entry in os.scandir(self.folder):
            if _IMAGE_FILE.fullmatch(entry.name):
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                        found.append(
                            CachedImageFile(status.st_mtime_ns, Path(entry.path), status.st_size)
                        )
        return sorted(found, key=lambda file: file.used_ns)

    def _evict(self, max_bytes: int, keep: Path) -> None:
        images = [image for image in self.list_images() if image.path != keep]
        total = sum(image.size_bytes for image in images)
        for image in images:
            if total <= max_bytes:
                return
            image.path.unlink(missing_ok=True)
            total -= image.size_bytes
            log.get_logger("engine").info(
                "packed weights evicted from the cache folder",
                file=image.path.name,
                bytes=image.size_bytes,
            )

    def _remove_unfinished(self) -> None:
        """Remove what processes that died while they wrote have left: its lock is free."""
        for entry in os.scandir(self.folder):
            if not _UNFINISHED_FILE.fullmatch(entry.name):
                continue
            try:
                fd = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW)
            except OSError:
                continue
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)
            os.close(fd)


def open_weight_cache(settings: WeightCacheSettings | None) -> WeightCacheFolder | None:
    """Open the configured folder; None if there is none, or it cannot be used, which is logged.

    Raises ConfigError if it cannot be used although somebody named it.
    """
    if settings is None or not prepare_cache_folder(settings):
        return None
    return WeightCacheFolder(settings.folder, settings.max_bytes)


def prepare_cache_folder(settings: WeightCacheSettings) -> bool:
    """Create the folder if it does not exist. Returns whether it can be used; if not, logs why.

    Raises ConfigError if it cannot be used although somebody named it.
    """
    try:
        require_private_folder(settings.folder)
    except OSError as error:
        if settings.is_explicit:
            raise invalid_folder_error(settings.folder, error) from error
        _warn_of_unusable_folder(settings.folder, error.strerror)
        return False
    return True


@dataclass(frozen=True, slots=True)
class CachedImageFile:
    """One file of the cache folder."""

    used_ns: int  # when it was last read or written, in nanoseconds since the epoch
    path: Path
    size_bytes: int


@contextmanager
def lock_cache_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of the folder, under which files are created and removed."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@cache  # one line in each process, although several parts of a node use the folder
def _warn_of_unusable_folder(folder: Path, reason: str) -> None:
    log.get_logger("engine").warning(
        "packed weights and measured steps are not cached: the folder cannot be used",
        folder=str(folder),
        error=reason,
    )


def _open_unfollowed(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)


def _require_private_file(found: os.stat_result) -> None:
    """Raise ValueError for a file that others may have written."""
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ValueError(
            f"it belongs to user {found.st_uid} with mode {found.st_mode & 0o777:o}, "
            "so others may have written it"
        )


def _check_file(fd: int, layout: ImageLayout) -> dict[str, str]:
    """The checksums in the file's header. Raises ValueError for a file that must not be read."""
    found = os.fstat(fd)
    _require_private_file(found)
    if found.st_size != layout.image_bytes:
        raise ValueError(f"it has {found.st_size} bytes, and the image {layout.image_bytes}")
    return layout.decode_header(os.pread(fd, layout.header_bytes, 0))


def _read_regions(
    fd: int, layout: ImageLayout, memory: ImageMemory, on_read: Callable[[int], None]
) -> None:
    """Read all but the header on several threads. Raises OSError.

    With a header, the memory would be taken for a complete image before its checksums are verified.
    """

    def read_piece(piece: range) -> None:
        at = layout.header_bytes + piece.start
        end = layout.header_bytes + piece.stop
        while at < end:
            count = os.preadv(fd, [memory.view[at:end]], at)
            if not count:
                raise OSError(0, "it became shorter while it was read")
            at += count
        on_read(len(piece))

    data_bytes = layout.image_bytes - layout.header_bytes
    run_on_threads(read_piece, split_into_pieces(data_bytes, _READ_BYTES))


def _write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view[:_READ_BYTES], offset)
        view, offset = view[count:], offset + count
