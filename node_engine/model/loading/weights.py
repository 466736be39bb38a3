"""Loads the weights of a model: checks, fuses and packs tensors, and computes their digest."""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baton.errors import ConfigError
from baton.models.model_identity import FP8, UNQUANTIZED, Quantization
from kv_kernels.reference.elementwise import RMSNorm
from kv_kernels.reference.linear import Linear
from kv_kernels.reference.torch_kernels import TorchKernels
from node_engine.model.config.model_config import ModelConfig
from node_engine.model.loading.checkpoint import Checkpoint
from node_engine.model.loading.model_digest import ModelDigest

DUMMY_SEED = 0
_DUMMY_STD = 0.02
_MAX_NAMES_SHOWN = 5  # names in an error message
# Buffers in old checkpoints that are not used.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)

TensorSource = Callable[[str], torch.Tensor]  # name -> tensor as stored


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Packed weights of one transformer layer."""

    attention_norm: RMSNorm
    qkv: Linear  # hidden -> (heads + 2 * kv_heads) * head_dim
    qk_norm: RMSNorm | None  # over each head of queries and keys: [heads + kv_heads, head_dim]
    output: Linear  # heads * head_dim -> hidden
    mlp_norm: RMSNorm
    gate_up: Linear  # hidden -> 2 * intermediate
    down: Linear  # intermediate -> hidden


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Packed weights of a model."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: RMSNorm
    head: Linear  # hidden -> vocab
    digest: bytes  # 32 bytes, over the architecture and every tensor
    quantization: Quantization = UNQUANTIZED  # of the linear layers but the head


def compute_expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of this architecture's checkpoints, in loading order."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
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


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernels: TorchKernels,
    quantization: Quantization = UNQUANTIZED,
) -> ModelWeights:
    """Read, check and pack the folder's safetensors. Raises ConfigError that names the tensor."""
    with Checkpoint(folder) as checkpoint:
        shapes = compute_expected_shapes(config)
        require_match(folder, checkpoint, shapes, config)
        digest = ModelDigest(config, "safetensors", quantization)

        def source(name: str) -> torch.Tensor:
            tensor = checkpoint.load_tensor(name)
            if not tensor.is_floating_point():
                raise ConfigError(
                    f"{folder}: {name} is stored as {tensor.dtype}: serve unquantized weights"
                )
            digest.add_tensor(name, tensor)
            return tensor.to(device, dtype)

        weights = _build_weights(config, source, kernels, quantization)
    return ModelWeights(*weights, digest.compute_digest(), quantization)


def build_dummy_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernels: TorchKernels,
    quantization: Quantization = UNQUANTIZED,
) -> ModelWeights:
    """Random weights, equal in every process, for measurements without a download."""
    generator = torch.Generator().manual_seed(DUMMY_SEED)
    shapes = compute_expected_shapes(config)

    def source(name: str) -> torch.Tensor:
        shape = shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        return torch.empty(shape).normal_(0.0, _DUMMY_STD, generator=generator).to(device, dtype)

    weights = _build_weights(config, source, kernels, quantization)
    digest = ModelDigest(config, f"dummy {DUMMY_SEED}", quantization)
    return ModelWeights(*weights, digest.compute_digest(), quantization)


def require_match(
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


def _build_weights(
    config: ModelConfig, source: TensorSource, kernels: TorchKernels, quantization: Quantization
) -> tuple[torch.Tensor, tuple[LayerWeights, ...], RMSNorm, Linear]:
    embedding = source("model.embed_tokens.weight")
    layers = tuple(
        _build_layer(config, source, kernels, quantization, layer)
        for layer in _iter_layers_with_progress(config.num_layers)
    )
    norm = kernels.make_rms_norm(source("model.norm.weight"), config.norm_eps)
    head = embedding if config.tied_embeddings else source("lm_head.weight")
    return embedding, layers, norm, kernels.make_linear(head, None)


def _build_layer(
    config: ModelConfig,
    source: TensorSource,
    kernels: TorchKernels,
    quantization: Quantization,
    layer: int,
) -> LayerWeights:
    prefix = f"model.layers.{layer}."
    make_linear = kernels.make_fp8_linear if quantization == FP8 else kernels.make_linear

    def fused(bias: bool, *names: str) -> Linear:
        weight = [source(f"{prefix}{name}.weight") for name in names]
        biases = [source(f"{prefix}{name}.bias") for name in names] if bias else None
        joined = weight[0] if len(weight) == 1 else torch.cat(weight)
        return make_linear(joined, torch.cat(biases) if biases else None)

    return LayerWeights(
        attention_norm=kernels.make_rms_norm(
            source(f"{prefix}input_layernorm.weight"), config.norm_eps
        ),
        qkv=fused(config.qkv_bias, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        qk_norm=_build_qk_norm(config, source, kernels, prefix) if config.qk_norm else None,
        output=fused(config.output_bias, "self_attn.o_proj"),
        mlp_norm=kernels.make_rms_norm(
            source(f"{prefix}post_attention_layernorm.weight"), config.norm_eps
        ),
        gate_up=fused(config.mlp_bias, "mlp.gate_proj", "mlp.up_proj"),
        down=fused(config.mlp_bias, "mlp.down_proj"),
    )


def _build_qk_norm(
    config: ModelConfig, source: TensorSource, kernels: TorchKernels, prefix: str
) -> RMSNorm:
    """One norm for queries and keys, which are adjacent in the fused projection."""
    query, key = (
        source(f"{prefix}self_attn.q_norm.weight"),
        source(f"{prefix}self_attn.k_norm.weight"),
    )
    rows = (query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1))
    return kernels.make_rms_norm(torch.cat(rows), config.norm_eps)


def _iter_layers_with_progress(num_layers: int) -> Iterator[int]:
    """Layer numbers, with a progress bar if stderr is a terminal."""
    layers: Iterable[int] = range(num_layers)
    if not sys.stderr.isatty():
        yield from layers
        return
    columns = (
        TextColumn("loading weights"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("layers"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield from progress.track(layers, total=num_layers)
