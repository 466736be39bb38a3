"""The model digest: two nodes may exchange KV only if their digests are equal."""

import hashlib
import json
from dataclasses import asdict
from typing import Any

import torch
import xxhash

from baton.models.model_identity import NATIVE_IMPLEMENTATION, UNQUANTIZED, Quantization
from node_engine.model.config.model_config import ModelConfig

# Configuration fields that do not affect the arithmetic.
_EXCLUDED_FIELDS = ("stored_dtype", "eos_token_ids", "max_position_embeddings")


class ModelDigest:
    """SHA-256 over the architecture and each tensor's name, dtype, shape and XXH3-128 of its bytes.

    Block hashes are derived from it and from the KV layout, which includes the dtype of KV. The
    digest therefore also covers what else KV depends on: the implementation of the model and the
    quantization of its weights. It does not depend on shards or file order. XXH3 runs at memory
    speed and detects accidents (another revision, a damaged download), not weights forged on
    purpose; members of the cluster are trusted, because they have its token.
    """

    def __init__(
        self, config: ModelConfig, origin: str, quantization: Quantization = UNQUANTIZED
    ) -> None:
        """`origin` distinguishes weights from files and dummy weights."""
        self._architecture = {
            key: value for key, value in asdict(config).items() if key not in _EXCLUDED_FIELDS
        }
        self._origin = origin
        self._quantization = quantization
        self._tensors: dict[str, str] = {}

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor as it is stored, on the CPU."""
        contents = xxhash.xxh3_128_hexdigest(tensor.contiguous().view(torch.uint8).numpy().data)
        self._tensors[name] = f"{tensor.dtype} {tuple(tensor.shape)} {contents}"

    @property
    def identity(self) -> dict[str, Any]:
        """What the digest covers beside the tensors, as JSON can express it."""
        return {
            "implementation": NATIVE_IMPLEMENTATION,
            "quantization": self._quantization,
            "origin": self._origin,
            "architecture": self._architecture,
        }

    def compute_digest(self) -> bytes:
        """The digest, 32 bytes."""
        named = self.identity | {"tensors": self._tensors}
        return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).digest()
