"""The model digest of a folder, without reading the tensors of a checkpoint that is known."""

from pathlib import Path

from node_engine.model.loading.checkpoint import list_shards
from node_engine.model.loading.model_tensors import CheckpointTensors
from node_engine.model.loading.packed_weights.checkpoint_fingerprint import take_fingerprint
from node_engine.model.loading.packed_weights.digest_cache import ModelDigestCache


def find_model_digest(
    folder: Path, tensors: CheckpointTensors, cache: ModelDigestCache | None = None
) -> bytes:
    """Return the digest of the folder's tensors, from the cache if no file has changed.

    Otherwise all tensors are read and hashed, and the digest is remembered. Raises ConfigError.
    """
    if cache is None:
        return tensors.compute_digest()
    shards = list_shards(folder)
    before = take_fingerprint(shards)
    if (known := cache.find_digest(before, tensors.identity)) is not None:
        return known
    digest = tensors.compute_digest()
    cache.save_digest(before, take_fingerprint(shards), tensors.identity, digest)
    return digest
