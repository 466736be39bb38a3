"""Remembers the model digests of checkpoints, so that a start need not read their tensors."""

import json
from collections.abc import Mapping
from pathlib import Path

from baton.process import log
from node_engine.model.loading.packed_weights.checkpoint_fingerprint import CheckpointFingerprint
from node_engine.model.loading.packed_weights.small_files import SmallFiles

_DIGEST_BYTES = 32


class ModelDigestCache:
    """Small files, named by a checkpoint's fingerprint, in the folder of cached weights."""

    def __init__(self, folder: Path) -> None:
        """`folder` is that of a WeightCacheFolder, which has checked who owns it."""
        self.folder = folder
        self._files = SmallFiles(folder, ".digest", _DIGEST_BYTES)

    def find_digest(
        self, fingerprint: CheckpointFingerprint, identity: Mapping[str, object]
    ) -> bytes | None:
        """The model digest of a checkpoint; None if its tensors have to be hashed.

        `identity` is what the digest covers beside the tensors (`ModelDigest.identity`).
        """
        found = self._files.read(_make_key(fingerprint, identity))
        return None if found is None or len(found.content) != _DIGEST_BYTES else found.content

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
        try:
            self._files.write(_make_key(before, identity), digest)
        except OSError as error:
            log.get_logger("engine").warning(
                "the model digest is not cached", folder=str(self.folder), error=error.strerror
            )
            return False
        return True


def _make_key(fingerprint: CheckpointFingerprint, identity: Mapping[str, object]) -> str:
    return json.dumps([fingerprint.files, identity], sort_keys=True, default=list)
