"""The identity of the model that a node serves: everything its tokens and KV blocks depend on."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from baton.kv.blocks import KVLayout

KVDType = Literal["auto", "int8"]  # of keys and values; auto: the dtype of the arithmetic
Quantization = Literal["none", "fp8", "int8"]  # of the products of a model's layers

NATIVE_IMPLEMENTATION = "native"  # the model code of node_engine/model
PACED_IMPLEMENTATION = "paced"
UNQUANTIZED: Quantization = "none"
FP8: Quantization = "fp8"  # e4m3, a scale for each output feature and for each row of activations
INT8: Quantization = "int8"  # symmetric, scales as those of FP8; on CPUs
FP8_MIN_CAPABILITY = (8, 9)  # compute capability of the first NVIDIA GPUs with FP8 products


@dataclass(frozen=True)
class ModelIdentity:
    """Nodes of equal identity give the same tokens for a request, up to rounding by the device."""

    implementation: str  # the code that runs the model
    model_digest: str  # of weights and architecture, in hex
    dtype: str  # of the arithmetic
    quantization: str  # of the products of its layers
    layout: KVLayout  # its dtype is that of the KV cache
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def named_fields(self) -> dict[str, object]:
        """Return all fields by name, in the order in which two identities are compared."""
        found: dict[str, object] = {
            "implementation": self.implementation,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "model_digest": self.model_digest,
            "vocab_size": self.vocab_size,
            "eos_token_ids": tuple(sorted(set(self.eos_token_ids))),
        }
        for name in KVLayout.__dataclass_fields__:
            found[f"layout.{name}"] = getattr(self.layout, name)
        return found

    @cached_property
    def digest(self) -> bytes:
        """The 32-byte digest that requests are bound to and that every order carries."""
        return hashlib.sha256(json.dumps(self.named_fields(), sort_keys=True).encode()).digest()
