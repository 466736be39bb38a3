"""Checks whether a model can be served with a `--quantize` and a `--kv-dtype` on a device."""

import torch

from baton.errors import ConfigError
from baton.models.model_identity import FP8, FP8_MIN_CAPABILITY, INT8, KVDType, Quantization
from kv_kernels.reference.fp8 import WIDTH_MULTIPLE
from kv_kernels.reference.int8_kv import DIM_MULTIPLE
from kv_kernels.reference.int8_linear import MAX_WIDTH
from node_engine.model.config.model_config import ModelConfig


def check_quantization(
    quantize: Quantization,
    config: ModelConfig,
    dtype: str,
    device: torch.device,
    *,
    emulates_fp8: bool,
) -> None:
    """Raises ConfigError if the model cannot be served on `device` with this `--quantize`.

    With `emulates_fp8` a CPU will do.
    """
    if quantize == FP8:
        require_fp8_model(config, dtype)
        if device.type != "cpu" or not emulates_fp8:
            require_fp8_products(device)
    if quantize == INT8:
        require_int8_model(config)
        require_cpu(device, "quantize", "choose --quantize fp8 on a GPU that has FP8,")


def require_int8_model(config: ModelConfig) -> None:
    """Raises ConfigError for a shape that int8 products do not serve."""
    widths = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "the width of queries": config.num_heads * config.head_dim,
    }
    for name, width in widths.items():
        if width > MAX_WIDTH:
            raise ConfigError(
                f"--quantize int8: {name} of the model is {width}, and int8 products add up to"
                f" {MAX_WIDTH} numbers: choose --quantize none",
                param="quantize",
            )


def check_kv_dtype(kv_dtype: KVDType, config: ModelConfig, device: torch.device) -> None:
    """Raises ConfigError if the model cannot be served on `device` with this `--kv-dtype`."""
    if kv_dtype == "auto":
        return
    require_cpu(device, "kv_dtype", "choose --kv-dtype auto,")
    if config.head_dim % DIM_MULTIPLE:
        raise ConfigError(
            f"--kv-dtype int8: head_dim of the model is {config.head_dim}, and KV in int8 needs a"
            f" multiple of {DIM_MULTIPLE}: choose --kv-dtype auto",
            param="kv_dtype",
        )


def require_cpu(device: torch.device, param: str, choice: str) -> None:
    """Raises ConfigError for a GPU, which has no kernels for int8 here."""
    if device.type != "cpu":
        raise ConfigError(
            f"--{param.replace('_', '-')} int8 is for CPUs, and this node computes on a GPU:"
            f" {choice} or --device cpu",
            param=param,
        )


def require_fp8_model(config: ModelConfig, dtype: str) -> None:
    """Raises ConfigError for a dtype or a shape that FP8 products do not serve."""
    if dtype != "bfloat16":
        raise ConfigError(
            f"--quantize fp8 goes with dtype bfloat16, and dtype is {dtype} here:"
            " choose --dtype bfloat16 or --quantize none",
            param="quantize",
        )
    widths = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "the width of queries": config.num_heads * config.head_dim,
        "the width of queries, keys and values": (
            (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        ),
    }
    for name, width in widths.items():
        if width % WIDTH_MULTIPLE:
            raise ConfigError(
                f"--quantize fp8: {name} of the model is {width}, and FP8 products need multiples"
                f" of {WIDTH_MULTIPLE}: choose --quantize none",
                param="quantize",
            )


def require_fp8_products(device: torch.device) -> None:
    """Raises ConfigError for a device that does not multiply in FP8."""
    needed = "an NVIDIA GPU of compute capability 8.9 or later, such as an L40S, H100 or H200"
    if device.type != "cuda":
        raise ConfigError(
            f"--quantize fp8 needs {needed}, and this node computes on a CPU: choose"
            " --device cuda on such a machine, or --quantize none",
            param="quantize",
        )
    found = torch.cuda.get_device_capability(device)
    if found < FP8_MIN_CAPABILITY:
        name, capability = torch.cuda.get_device_name(device), ".".join(map(str, found))
        raise ConfigError(
            f"--quantize fp8 needs {needed}, and {name} has {capability}: choose --quantize none",
            param="quantize",
        )
