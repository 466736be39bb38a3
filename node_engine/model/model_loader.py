"""Builds the engine of a Hugging Face model folder: native or torch on CPUs, Triton on GPUs."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from baton.errors import ConfigError, OutOfMemory
from baton.models.model_identity import FP8, UNQUANTIZED, KVDType, Quantization
from kv_kernels.dispatch import kernels_for
from kv_kernels.reference.torch_kernels import TorchKernels
from node_engine.model.common.base_engine import TORCH_DTYPES, BaseEngine
from node_engine.model.cpu.native_loader import load_native_engine
from node_engine.model.cpu.native_options import NativeOptions
from node_engine.model.loading.resolved_model import (
    Device,
    DType,
    ResolvedModel,
    resolve_device,
    resolve_model,
)
from node_engine.model.loading.weight_memory import report_too_large_model
from node_engine.model.loading.weights import ModelWeights, build_dummy_weights, load_weights
from node_engine.model.model_engine import ModelEngine, Sampler
from node_engine.model.sampling.sampler import sample_tokens
from node_engine.model.transformer import Transformer

__all__ = [
    "DType",
    "Device",
    "LoadFormat",
    "NativeOptions",
    "load_model_engine",
    "resolve_device",
]

DEFAULT_MAX_NUM_SEQS = 256  # sequences of the largest decode step that is captured
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
    native: NativeOptions | None = None,
) -> BaseEngine:
    """Build an engine from a Hugging Face folder.

    `threads` is the number of threads of a forward pass; None for as many as torch has. On a CPU
    the kernels of `native` compute if they are given. On a GPU, decode steps of up to
    `max_num_seqs` sequences are captured in graphs if `uses_graphs`; with `deterministic`,
    `choose_kernels` has to choose batch-invariant ones. With `emulates_fp8`, a CPU computes in FP8
    too: the same numbers, slowly, for comparisons. Raises ConfigError for what is not served.
    """
    torch.set_num_threads(threads or torch.get_num_threads())
    model = resolve_model(
        Path(path),
        dtype=dtype,
        device=device,
        block_size=block_size,
        max_model_len=max_model_len,
        quantize=quantize,
        kv_dtype=kv_dtype,
        emulates_fp8=emulates_fp8,
    )
    is_dummy = load_format == "dummy"
    if native and _has_native_kernels(model):
        return _load_native(model, native, is_dummy=is_dummy)
    _check_determinism(model.device, deterministic=deterministic)
    choose = choose_kernels or partial(kernels_for, deterministic=deterministic)
    if model.device.type == "cpu":
        return _load_torch(model, choose(model.device), sampler, is_dummy=is_dummy)
    graph_rows = max_num_seqs if uses_graphs else 0
    return _load_gpu(model, choose, graph_rows, deterministic, is_dummy=is_dummy)


def _has_native_kernels(model: ResolvedModel) -> bool:
    """Whether the native kernels compute this model: on a CPU, and not in FP8."""
    return model.device.type == "cpu" and model.quantization != FP8


def _load_native(model: ResolvedModel, native: NativeOptions, *, is_dummy: bool) -> BaseEngine:
    threads = torch.get_num_threads()
    with (
        torch.inference_mode(),
        report_too_large_model(model.config, model.dtype, model.device),
    ):
        try:
            engine = load_native_engine(model, native, threads, is_dummy=is_dummy)
        except MemoryError as error:
            raise OutOfMemory(str(error)) from error
    # What torch still computes is small: its threads would spin on the cores of the kernels.
    torch.set_num_threads(1)
    return engine


def _load_torch(
    model: ResolvedModel, kernels: TorchKernels, sampler: Sampler, *, is_dummy: bool
) -> BaseEngine:
    with (
        torch.inference_mode(),
        report_too_large_model(model.config, model.dtype, model.device),
    ):
        weights = _read_weights(model, kernels, is_dummy=is_dummy)
        transformer = Transformer(model.config, weights, kernels)
    return ModelEngine(
        model.config,
        transformer,
        kernels,
        model.layout,
        model.device,
        model.max_model_len,
        weights.digest,
        sampler,
        model.dtype,
    )


def _load_gpu(
    model: ResolvedModel,
    choose_kernels: Callable[[torch.device], TorchKernels],
    max_graph_rows: int,
    deterministic: bool,
    *,
    is_dummy: bool,
) -> BaseEngine:
    from node_engine.model.gpu.fused_transformer import FusedTransformer  # imports triton
    from node_engine.model.gpu.gpu_engine import GpuEngine

    kernels = choose_kernels(model.device)
    config, longest = model.config, model.max_model_len
    with torch.inference_mode(), report_too_large_model(config, model.dtype, model.device):
        weights = _read_weights(model, kernels, is_dummy=is_dummy)
        return GpuEngine(
            config,
            FusedTransformer(config, weights, longest, deterministic=deterministic),
            kernels,
            model.layout,
            model.device,
            longest,
            weights.digest,
            max_graph_rows=max_graph_rows,
        )


def _read_weights(model: ResolvedModel, kernels: TorchKernels, *, is_dummy: bool) -> ModelWeights:
    how = model.config, TORCH_DTYPES[model.dtype], model.device, kernels, model.quantization
    return build_dummy_weights(*how) if is_dummy else load_weights(model.folder, *how)


def _check_determinism(device: torch.device, *, deterministic: bool) -> None:
    if deterministic and device.type != "cuda":
        raise ConfigError(
            "deterministic: sums of torch's kernels on a CPU depend on the number of rows: use"
            " native kernels (--cpu-kernels native), --device cuda, or --dtype float32 without"
            " --deterministic",
            param="deterministic",
        )
