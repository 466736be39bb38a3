"""Remembers the model digests of checkpoints, so that a start need not read their tensors."""

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from baton.process import log
from node_engine.model.loading.packed_weights.cache_folder import lock_cache_folder
from node_engine.model.loading.packed_weights.checkpoint_fingerprint import CheckpointFingerprint

_SUFFIX = ".digest"
_DIGEST_BYTES = 32
_FILE_BYTES = 2 * _DIGEST_BYTES  # the digest, and its SHA-256 together with the file's name
_MAX_FILES = 256


class ModelDigestCache:
    """Small files, named by a checkpoint's fingerprint, in the folder of cached weights."""

    def __init__(self, folder: Path) -> None:
        """`folder` is that of a WeightCacheFolder, which has checked who owns it."""
        self.folder = folder

    def find_digest(
        self, fingerprint: CheckpointFingerprint, identity: Mapping[str, object]
    ) -> bytes | None:
        """The model digest of a checkpoint; None if its tensors have to be hashed.

        `identity` is what the digest covers beside the tensors (`ModelDigest.identity`).
        """
        name = _file_name(fingerprint, identity)
        try:
            fd = os.open(self.folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            status = os.fstat(fd)
            data = os.read(fd, _FILE_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
        except OSError:
            return None
        finally:
            os.close(fd)
        digest = data[:_DIGEST_BYTES]
        is_private = status.st_uid == os.geteuid() and not status.st_mode & 0o022
        return digest if is_private and data == _encode_file(name, digest) else None

    def save_digest(
        self,
        before: CheckpointFingerprint,
        after: CheckpointFingerprint,
        identity: Mapping[str, object],
        digest: bytes,
    ) -> bool:
        """Remember a digest. Returns whether it can be trusted later, and was saved.

        `before` and `after` are the fingerprints before and after the tensors were read.
        """
        if before.files != after.files or not before.is_settled:
            return False
        name = _file_name(before, identity)
        unfinished = self.folder / f".{secrets.token_hex(16)}.unfinished"
        try:
            with lock_cache_folder(self.folder):  # which keeps others from removing the file
                _write_new_file(unfinished, _encode_file(name, digest))
                unfinished.replace(self.folder / name)
                self._remove_oldest()
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink()
            log.get_logger("engine").warning(
                "the model digest is not cached", folder=str(self.folder), error=error.strerror
            )
            return False
        return True

    def _remove_oldest(self) -> None:
        files = sorted(self.folder.glob(f"*{_SUFFIX}"), key=lambda path: -path.stat().st_mtime)
        for path in files[_MAX_FILES:]:
            path.unlink(missing_ok=True)


def _write_new_file(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def _file_name(fingerprint: CheckpointFingerprint, identity: Mapping[str, object]) -> str:
    named = json.dumps([fingerprint.files, identity], sort_keys=True, default=list).encode()
    return hashlib.sha256(named).hexdigest() + _SUFFIX


def _encode_file(name: str, digest: bytes) -> bytes:
    return digest + hashlib.sha256(name.encode() + digest).digest()
