"""The tensors of a model: names, shapes, and where they come from: a checkpoint or a generator."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from baton.errors import ConfigError
from baton.models.model_identity import UNQUANTIZED, Quantization
from node_engine.model.config.model_config import ModelConfig
from node_engine.model.loading.checkpoint import Checkpoint
from node_engine.model.loading.model_digest import ModelDigest

DUMMY_SEED = 0
EMBEDDING_TENSOR = "model.embed_tokens.weight"
_DUMMY_STD = 0.02
_MAX_NAMES_SHOWN = 5  # names in an error message
# Buffers in old checkpoints that are not used.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)

TensorSource = Callable[[str], torch.Tensor]  # name -> tensor in the dtype of the engine


def compute_expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of this architecture's checkpoints, in loading order."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING_TENSOR: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        linears = (
            ("self_attn.q_proj", query, hidden, config.qkv_bias),
            ("self_attn.k_proj", kv, hidden, config.qkv_bias),
            ("self_attn.v_proj", kv, hidden, config.qkv_bias),
            ("self_attn.o_proj", hidden, query, config.output_bias),
            ("mlp.gate_proj", inner, hidden, config.mlp_bias),
            ("mlp.up_proj", inner, hidden, config.mlp_bias),
            ("mlp.down_proj", hidden, inner, config.mlp_bias),
        )
        for name, rows, columns, bias in linears:
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        if config.qk_norm:
            shapes[f"{prefix}self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


class CheckpointTensors:
    """The tensors of a folder's safetensors, checked against the architecture."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization = UNQUANTIZED,
    ) -> None:
        """Raises ConfigError that names a missing or unexpected tensor."""
        self._folder = folder
        self._dtype, self._device = dtype, device
        self._names = tuple(compute_expected_shapes(config))
        self._digest = ModelDigest(config, "safetensors", quantization)
        self._hashed: set[str] = set()
        self._checkpoint = Checkpoint(folder)
        try:
            _require_match(folder, self._checkpoint, compute_expected_shapes(config), config)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._checkpoint.close()

    def load_tensor(self, name: str) -> torch.Tensor:
        """A tensor on the device, in the dtype of the engine. Raises ConfigError."""
        return self._read_tensor(name).to(self._device, self._dtype)

    @property
    def identity(self) -> dict[str, Any]:
        """What the digest covers beside the tensors."""
        return self._digest.identity

    def compute_digest(self) -> bytes:
        """The model digest, 32 bytes; reads the tensors that were not loaded yet."""
        for name in self._names:
            if name not in self._hashed:
                self._read_tensor(name)
        return self._digest.compute_digest()

    def _read_tensor(self, name: str) -> torch.Tensor:
        tensor = self._checkpoint.load_tensor(name)
        if not tensor.is_floating_point():
            raise ConfigError(
                f"{self._folder}: {name} is stored as {tensor.dtype}: serve unquantized weights"
            )
        if name not in self._hashed:
            self._digest.add_tensor(name, tensor)
            self._hashed.add(name)
        return tensor


class DummyTensors:
    """Random weights, equal in every process on the same kind of device, for measurements.

    They are drawn on the device, which for a GPU takes a second instead of a minute. A GPU of
    another kind, or a CPU, draws other numbers, and so the model digest names the kind of GPU.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization = UNQUANTIZED,
    ) -> None:
        self._shapes = compute_expected_shapes(config)
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator(device).manual_seed(DUMMY_SEED)
        self._digest = ModelDigest(config, _name_dummy_origin(device), quantization)
        self._embedding: torch.Tensor | None = None  # the only tensor that is loaded twice

    def close(self) -> None:
        self._embedding = None

    def load_tensor(self, name: str) -> torch.Tensor:
        """Draw the next tensor: values depend on the order of the calls."""
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        if name == EMBEDDING_TENSOR and self._embedding is not None:
            return self._embedding
        # On a GPU in the engine's dtype: its allocator would keep the larger float32 buffers.
        drawn_dtype = torch.float32 if self._device.type == "cpu" else self._dtype
        drawn = torch.empty(shape, dtype=drawn_dtype, device=self._device)
        tensor = drawn.normal_(0.0, _DUMMY_STD, generator=self._generator).to(self._dtype)
        if name == EMBEDDING_TENSOR:
            self._embedding = tensor
        return tensor

    def compute_digest(self) -> bytes:
        """The model digest, 32 bytes."""
        return self._digest.compute_digest()


def _name_dummy_origin(device: torch.device) -> str:
    """What dummy weights depend on: the seed, and the kind of GPU that draws them."""
    drawn_by = f" {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    return f"dummy {DUMMY_SEED}{drawn_by}"


def _require_match(
    folder: Path, checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]], config: ModelConfig
) -> None:
    ignored = {name for name in checkpoint.tensor_names if name.endswith(_IGNORED_SUFFIXES)}
    if config.tied_embeddings:
        ignored.add("lm_head.weight")
    _refuse_tensors(folder, "lacks tensors", sorted(shapes.keys() - checkpoint.tensor_names))
    _refuse_tensors(
        folder,
        "has tensors that its config.json does not explain",
        sorted(checkpoint.tensor_names - shapes.keys() - ignored),
    )
    wrong = [
        f"{name} {checkpoint.get_shape(name)} instead of {shape}"
        for name, shape in shapes.items()
        if checkpoint.get_shape(name) != shape
    ]
    _refuse_tensors(folder, "has tensors of the wrong shape for its config.json", wrong)


def _refuse_tensors(folder: Path, what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else ""
        raise ConfigError(
            f"{folder} {what}: {', '.join(names[:_MAX_NAMES_SHOWN])}{more}:"
            " download the model again"
        )
