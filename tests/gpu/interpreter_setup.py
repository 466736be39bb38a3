"""What is set in Triton's interpreter before it runs kernels in tests."""

import dataclasses
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH_DTYPES = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def _cast(data: Any, source: tl.dtype, target: tl.dtype, _: object) -> Any:
    """The bits of `data` in another floating-point type."""
    bits = torch.from_numpy(np.ascontiguousarray(data)).flatten().view(_TORCH_DTYPES[source])
    cast = bits.to(_TORCH_DTYPES[target]).view(torch.uint8).numpy()
    return cast.view(_UNSIGNED[target.primitive_bitwidth // 8]).reshape(data.shape)


def prepare_interpreter() -> None:
    """Let torch cast to and from bf16 and e4m3, and compute no check that nobody reads.

    The interpreter's own casts round halves up, carry wrongly into the exponent, and lose NaN. Its
    checks for overflow take a third of its time, and are asserted by kernels in debug mode only.
    """
    interpreter._convert_float = _cast
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
