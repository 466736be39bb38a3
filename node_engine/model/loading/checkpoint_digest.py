"""The model digest of a folder, without reading the tensors of a checkpoint that is known."""

from pathlib import Path

from baton.models.model_identity import UNQUANTIZED, Quantization
from node_engine.model.config.model_config import ModelConfig
from node_engine.model.loading.checkpoint import Checkpoint, list_shards
from node_engine.model.loading.model_digest import ModelDigest
from node_engine.model.loading.packed_weights.checkpoint_fingerprint import take_fingerprint
from node_engine.model.loading.packed_weights.digest_cache import ModelDigestCache
from node_engine.model.loading.weights import compute_expected_shapes, require_match


def find_model_digest(
    folder: Path,
    config: ModelConfig,
    quantization: Quantization = UNQUANTIZED,
    cache: ModelDigestCache | None = None,
) -> bytes:
    """Return the digest that `load_weights` computes, from the cache if no file has changed.

    Otherwise all tensors are read and hashed, and the digest is remembered. Raises ConfigError for
    a checkpoint that does not match its configuration; one in the cache did match.
    """
    shards = list_shards(folder)
    digest = ModelDigest(config, "safetensors", quantization)
    fingerprint = take_fingerprint(shards)
    if cache is not None:
        known = cache.find_digest(fingerprint, digest.identity)
        if known is not None:
            return known
    shapes = compute_expected_shapes(config)
    with Checkpoint(folder) as checkpoint:
        require_match(folder, checkpoint, shapes, config)
        for name in shapes:
            digest.add_tensor(name, checkpoint.load_tensor(name))
    computed = digest.compute_digest()
    if cache is not None:
        cache.save_digest(fingerprint, take_fingerprint(shards), digest.identity, computed)
    return computed
