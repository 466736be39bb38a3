"""A model as a node serves it: the configuration of its folder, and what settings make of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from baton.errors import ConfigError
from baton.kv.blocks import KVLayout
from baton.models.model_identity import UNQUANTIZED, KVDType, Quantization
from node_engine.model.config.model_config import ModelConfig, load_model_config
from node_engine.model.loading.quantization_support import check_kv_dtype, check_quantization

DType = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """What an engine is built from, beside the weights."""

    folder: Path
    config: ModelConfig
    layout: KVLayout
    dtype: str  # of the arithmetic; that of the KV cache is in the layout
    quantization: Quantization
    device: torch.device
    max_model_len: int  # tokens of the longest context


def resolve_model(
    folder: Path,
    *,
    dtype: DType,
    device: Device,
    block_size: int,
    max_model_len: int | None,
    quantize: Quantization = UNQUANTIZED,
    kv_dtype: KVDType = "auto",
    emulates_fp8: bool = False,
) -> ResolvedModel:
    """Read the configuration and check the settings. Raises ConfigError for what is not served."""
    config = load_model_config(folder)
    where = resolve_device(device)
    computed = _resolve_dtype(dtype, config)
    layout = KVLayout(
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        block_size,
        computed if kv_dtype == "auto" else kv_dtype,
    )
    check_quantization(quantize, config, computed, where, emulates_fp8=emulates_fp8)
    check_kv_dtype(kv_dtype, config, where)
    longest = _resolve_length(max_model_len, config)
    return ResolvedModel(folder, config, layout, computed, quantize, where, longest)


def resolve_device(device: Device) -> torch.device:
    """The device that `device` names here. Raises ConfigError for a GPU that torch does not see."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: torch sees no NVIDIA GPU here: use --device cpu")
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


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
