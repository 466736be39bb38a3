"""Small private files in the folder of cached weights, for results that take long to compute."""

import hashlib
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from node_engine.model.loading.packed_weights.cache_folder import lock_cache_folder

_MAX_FILES = 256  # of one suffix
_CHECK_BYTES = 32


class SmallFile(NamedTuple):
    """A file that can be trusted."""

    content: bytes
    written_at: float  # seconds since the epoch


class SmallFiles:
    """Files of one suffix, each named by a hash of what its content depends on.

    A file has a SHA-256 over its name and content. Files of other users, or that others can write,
    are not read.
    """

    def __init__(self, folder: Path, suffix: str, max_bytes: int) -> None:
        """`folder` is that of a WeightCacheFolder, which has checked who owns it."""
        self.folder = folder
        self._suffix = suffix
        self._max_bytes = max_bytes

    def read(self, key: str) -> SmallFile | None:
        """The file under `key`; None if there is none, or it cannot be trusted."""
        name = self._make_name(key)
        try:
            fd = os.open(self.folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            status = os.fstat(fd)
            limit = _CHECK_BYTES + self._max_bytes + 1
            data = os.read(fd, limit) if stat.S_ISREG(status.st_mode) else b""
        except OSError:
            return None
        finally:
            os.close(fd)
        is_private = status.st_uid == os.geteuid() and not status.st_mode & 0o022
        content = data[_CHECK_BYTES:]
        is_whole = len(content) <= self._max_bytes and data == _encode_file(name, content)
        return SmallFile(content, status.st_mtime) if is_private and is_whole else None

    def write(self, key: str, content: bytes) -> None:
        """Keep `content` under `key`, and remove the oldest files beyond the bound.

        Raises OSError, and ValueError if it is too large.
        """
        if len(content) > self._max_bytes:
            raise ValueError(f"{len(content)} bytes, of at most {self._max_bytes}")
        name = self._make_name(key)
        unfinished = self.folder / f".{secrets.token_hex(16)}.unfinished"
        try:
            with lock_cache_folder(self.folder):  # which keeps others from removing the file
                _write_new_file(unfinished, _encode_file(name, content))
                unfinished.replace(self.folder / name)
                self._remove_oldest()
        except OSError:
            with suppress(OSError):
                unfinished.unlink()
            raise

    def _make_name(self, key: str) -> str:
        return hashlib.sha256(key.encode()).hexdigest() + self._suffix

    def _remove_oldest(self) -> None:
        files = sorted(self.folder.glob(f"*{self._suffix}"), key=lambda path: -path.stat().st_mtime)
        for path in files[_MAX_FILES:]:
            path.unlink(missing_ok=True)


def _encode_file(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + content).digest() + content


def _write_new_file(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)
