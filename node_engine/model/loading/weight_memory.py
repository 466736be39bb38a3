"""How much memory the weights of a model need, and the error if there is less."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from baton.errors import ConfigError, OutOfMemory
from baton.kv.blocks import DTYPE_BYTES
from baton.shared_memory.available_memory import format_size
from node_engine.model.common.base_engine import translate_device_errors
from node_engine.model.config.model_config import ModelConfig
from node_engine.model.loading.model_tensors import compute_expected_shapes


def compute_weight_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of all tensors of the model in `dtype`, unquantized."""
    shapes = compute_expected_shapes(config).values()
    return sum(math.prod(shape) for shape in shapes) * DTYPE_BYTES[dtype]


@contextmanager
def report_too_large_model(config: ModelConfig, dtype: str, device: torch.device) -> Iterator[None]:
    """Raise ConfigError with figures if loading the weights exhausts the memory of `device`.

    Raises DeviceLost if the GPU fails meanwhile.
    """
    is_gpu = device.type == "cuda"
    free, total = torch.cuda.mem_get_info(device) if is_gpu else (0, 0)
    try:
        with translate_device_errors():
            yield
    except OutOfMemory as error:
        needed = compute_weight_bytes(config, dtype)
        found = f": {format_size(free)} of {format_size(total)} were free" if is_gpu else ""
        smaller = "--dtype bfloat16, " if dtype == "float32" else ""
        others = "stop what else uses the GPU, or a larger GPU" if is_gpu else "a larger machine"
        raise ConfigError(
            f"the model does not fit into the memory of the {'GPU' if is_gpu else 'machine'}: its"
            f" weights need {needed} bytes ({format_size(needed)}) in {dtype}{found}: use"
            f" {smaller}a smaller model, {others}",
            param="model",
        ) from error
