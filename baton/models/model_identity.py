"""Which model a node serves, in every respect that its tokens and its KV blocks depend on."""

import hashlib
import json
from dataclasses import dataclass

from baton.kv.kv_layout import KVLayout

NATIVE_IMPLEMENTATION = "native"  # the model code of node_engine/model
PACED_IMPLEMENTATION = "paced"
UNQUANTIZED = "none"


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Nodes of equal identity give the same tokens for the same request, within the rounding of
    their devices.

    `implementation` names the code that runs the model. `dtype` is that of its arithmetic,
    `layout.dtype` that of its KV. `model_digest` is over weights and architecture, in hex.
    """

    implementation: str
    model_digest: str
    dtype: str
    quantization: str
    layout: KVLayout
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def named_fields(self) -> dict[str, object]:
        """Every fact by its name, in the order in which two identities are compared."""
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

    def digest(self) -> bytes:
        """The 32 bytes that a request is bound to and that every order carries."""
        return hashlib.sha256(json.dumps(self.named_fields(), sort_keys=True).encode()).digest()
