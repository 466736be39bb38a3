"""Loads a model from a Hugging Face folder: its configuration, kernels and weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from baton.errors import ConfigError
from baton.kv.blocks import KVLayout
from baton.models.model_identity import UNQUANTIZED, KVDType, Quantization
from kv_kernels.dispatch import kernels_for
from kv_kernels.reference.torch_kernels import TorchKernels
from node_engine.model.common.base_engine import TORCH_DTYPES, BaseEngine
from node_engine.model.config.model_config import ModelConfig, load_model_config
from node_engine.model.loading.quantization_support import check_kv_dtype, check_quantization
from node_engine.model.loading.weight_memory import report_too_large_model
from node_engine.model.loading.weights import ModelWeights, build_dummy_weights, load_weights
from node_engine.model.model_engine import ModelEngine, Sampler
from node_engine.model.sampling.sampler import sample_tokens
from node_engine.model.transformer import Transformer

DEFAULT_MAX_NUM_SEQS = 256  # sequences of the largest decode step that is captured
DType = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "dummy"]


def load_model_engine(
    path: str | Path,
    *,
    dtype: DType = "auto",
    device: Device = "auto",
    block_size: int = 16,
    max_model_len: int | None = None,
    threads: int | None = None,
    load_format: LoadFormat = "auto",
    choose_kernels: Callable[[torch.device], TorchKernels] | None = None,
    sampler: Sampler = sample_tokens,
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS,
    uses_graphs: bool = True,
    deterministic: bool = False,
    quantize: Quantization = UNQUANTIZED,
    kv_dtype: KVDType = "auto",
    emulates_fp8: bool = False,
) -> BaseEngine:
    """Build an engine from a Hugging Face folder.

    `threads` is torch's intra-op thread count; None leaves it unchanged. On a GPU, decode steps of
    up to `max_num_seqs` sequences are captured in graphs if `uses_graphs`; with `deterministic`,
    `choose_kernels` has to choose batch-invariant ones. With `emulates_fp8`, a CPU computes in FP8
    too: the same numbers, slowly, for comparisons. Raises ConfigError for what is not served.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    folder = Path(path)
    config = load_model_config(folder)
    where = resolve_device(device)
    _check_determinism(where, deterministic=deterministic)
    kernels = (choose_kernels or partial(kernels_for, deterministic=deterministic))(where)
    computed = _resolve_dtype(dtype, config)
    layout = _build_layout(config, block_size, computed, kv_dtype, where)
    check_quantization(quantize, config, computed, where, emulates_fp8=emulates_fp8)
    with torch.inference_mode(), report_too_large_model(config, computed, where):
        read_weights = _build_dummy if load_format == "dummy" else load_weights
        weights = read_weights(folder, config, TORCH_DTYPES[computed], where, kernels, quantize)
        longest = _resolve_length(max_model_len, config)
        if where.type == "cuda":
            graph_rows = max_num_seqs if uses_graphs else 0
            return _build_gpu_engine(
                config, weights, kernels, layout, where, longest, graph_rows, deterministic
            )
        model = Transformer(config, weights, kernels)
    digest = weights.digest
    return ModelEngine(config, model, kernels, layout, where, longest, digest, sampler, computed)


def _build_layout(
    config: ModelConfig, block_size: int, dtype: str, kv_dtype: KVDType, device: torch.device
) -> KVLayout:
    """The layout of KV. Raises ConfigError for a --kv-dtype that is not served."""
    check_kv_dtype(kv_dtype, config, device)
    stored = dtype if kv_dtype == "auto" else kv_dtype
    return KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, block_size, stored)


def _build_gpu_engine(
    config: ModelConfig,
    weights: ModelWeights,
    kernels: TorchKernels,
    layout: KVLayout,
    device: torch.device,
    max_model_len: int,
    max_graph_rows: int,
    deterministic: bool,
) -> BaseEngine:
    from node_engine.model.gpu.fused_transformer import FusedTransformer  # imports triton
    from node_engine.model.gpu.gpu_engine import GpuEngine

    return GpuEngine(
        config,
        FusedTransformer(config, weights, max_model_len, deterministic=deterministic),
        kernels,
        layout,
        device,
        max_model_len,
        weights.digest,
        max_graph_rows=max_graph_rows,
    )


def _build_dummy(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernels: TorchKernels,
    quantization: Quantization,
) -> ModelWeights:
    return build_dummy_weights(config, dtype, device, kernels, quantization)


def resolve_device(device: Device) -> torch.device:
    """The device that `device` names here. Raises ConfigError for a GPU that torch does not see."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: torch sees no NVIDIA GPU here: use --device cpu")
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def _check_determinism(device: torch.device, *, deterministic: bool) -> None:
    if deterministic and device.type != "cuda":
        raise ConfigError(
            "deterministic: sums on a CPU depend on the number of rows: use --device cuda, or"
            " --dtype float32 without --deterministic",
            param="deterministic",
        )


def _resolve_dtype(dtype: DType, config: ModelConfig) -> str:
    """float16 folders run in bfloat16 unless float32 is asked for: the cache has no float16."""
    if dtype != "auto":
        return dtype
    stored = config.stored_dtype.removeprefix("torch.")
    if stored not in ("float32", "bfloat16", "float16"):
        raise ConfigError(
            f"dtype {config.stored_dtype!r} in config.json: choose --dtype float32 or bfloat16"
        )
    return "float32" if stored == "float32" else "bfloat16"


def _resolve_length(max_model_len: int | None, config: ModelConfig) -> int:
    longest = config.max_position_embeddings
    if max_model_len is None:
        return longest
    if not 1 <= max_model_len <= longest:
        raise ConfigError(
            f"--max-model-len {max_model_len}: the model's max_position_embeddings allows 1 to"
            f" {longest}"
        )
    return max_model_len
