"""The model's name for the cluster: two nodes may exchange KV only if their digests are equal."""

import hashlib
import json
from dataclasses import asdict

import torch
import xxhash

from baton.models.model_identity import NATIVE_IMPLEMENTATION, UNQUANTIZED
from node_engine.model.config.model_config import ModelConfig

# What the arithmetic does not depend on.
_EXCLUDED_FIELDS = ("stored_dtype", "eos_token_ids", "max_position_embeddings")


class ModelDigest:
    """SHA-256 over the architecture and, by name, each tensor's dtype, shape and XXH3-128 of its
    bytes.

    The names of blocks descend from it and from the layout, which has the dtype of KV. So what else
    their contents depend on is part of it: the implementation of the model and the quantization of
    its weights. Of shards and file order it is independent. XXH3 reads at memory speed and finds
    accidents (another revision, a damaged download). It is no defence against weights forged on
    purpose, and need not be: whoever may join the cluster holds its token.
    """

    def __init__(self, config: ModelConfig, origin: str) -> None:
        """`origin` tells weights that were read from weights that were made up."""
        self._architecture = {
            key: value for key, value in asdict(config).items() if key not in _EXCLUDED_FIELDS
        }
        self._origin = origin
        self._tensors: dict[str, str] = {}

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Take in a tensor as it is stored, on the CPU."""
        contents = xxhash.xxh3_128_hexdigest(tensor.contiguous().view(torch.uint8).numpy().data)
        self._tensors[name] = f"{tensor.dtype} {tuple(tensor.shape)} {contents}"

    def compute_digest(self) -> bytes:
        """32 bytes."""
        named = {
            "implementation": NATIVE_IMPLEMENTATION,
            "quantization": UNQUANTIZED,
            "origin": self._origin,
            "architecture": self._architecture,
            "tensors": self._tensors,
        }
        return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).digest()
