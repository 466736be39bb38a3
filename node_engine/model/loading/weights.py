"""Loads the weights of a model: fuses and packs its tensors for the torch and Triton kernels."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baton.models.model_identity import FP8, INT8, UNQUANTIZED, Quantization
from kv_kernels.reference.elementwise import RMSNorm
from kv_kernels.reference.linear import Linear
from kv_kernels.reference.torch_kernels import TorchKernels
from node_engine.model.config.model_config import ModelConfig
from node_engine.model.loading.model_tensors import (
    EMBEDDING_TENSOR,
    CheckpointTensors,
    DummyTensors,
    TensorSource,
)

LinearFactory = Callable[[torch.Tensor, torch.Tensor | None], Linear]  # weight, bias -> layer


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
    quantization: Quantization = UNQUANTIZED  # of the linear layers; of the head in int8 alone


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernels: TorchKernels,
    quantization: Quantization = UNQUANTIZED,
) -> ModelWeights:
    """Read, check and pack the folder's safetensors. Raises ConfigError that names the tensor."""
    with closing(CheckpointTensors(folder, config, dtype, device, quantization)) as tensors:
        weights = _build_weights(config, tensors.load_tensor, kernels, quantization)
        return ModelWeights(*weights, tensors.compute_digest(), quantization)


def build_dummy_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernels: TorchKernels,
    quantization: Quantization = UNQUANTIZED,
) -> ModelWeights:
    """Weights of DummyTensors."""
    with closing(DummyTensors(config, dtype, device, quantization)) as tensors:
        weights = _build_weights(config, tensors.load_tensor, kernels, quantization)
        return ModelWeights(*weights, tensors.compute_digest(), quantization)


def _build_weights(
    config: ModelConfig, source: TensorSource, kernels: TorchKernels, quantization: Quantization
) -> tuple[torch.Tensor, tuple[LayerWeights, ...], RMSNorm, Linear]:
    embedding = source(EMBEDDING_TENSOR)
    layers = tuple(
        _build_layer(config, source, kernels, quantization, layer)
        for layer in _iter_layers_with_progress(config.num_layers)
    )
    norm = kernels.make_rms_norm(source("model.norm.weight"), config.norm_eps)
    head = embedding if config.tied_embeddings else source("lm_head.weight")
    make_head = kernels.make_int8_linear if quantization == INT8 else kernels.make_linear
    return embedding, layers, norm, make_head(head, None)


def _build_layer(
    config: ModelConfig,
    source: TensorSource,
    kernels: TorchKernels,
    quantization: Quantization,
    layer: int,
) -> LayerWeights:
    prefix = f"model.layers.{layer}."
    make_linear = _choose_linear(kernels, quantization)

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


def _choose_linear(kernels: TorchKernels, quantization: Quantization) -> LinearFactory:
    """What makes the linear layers of a transformer layer."""
    if quantization == FP8:
        return kernels.make_fp8_linear
    return kernels.make_int8_linear if quantization == INT8 else kernels.make_linear


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
