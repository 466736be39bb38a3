"""The token-wise operations before the FP8 products of a transformer layer, in Triton.

They return rows in e4m3. One program computes a whole row, because its scale depends on all of it.
Results are rounded to the dtype of the input before they are quantized, as in torch, where
`reference/fp8.py` quantizes what `reference/elementwise.py` computes.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl

from kv_kernels.reference.fp8 import E4M3, E4M3_MAX, MIN_PEAK, Fp8Rows
from kv_kernels.triton.layer_ops import add_and_normalize, gate_with_silu

_MAX_WARPS = 32
_ELEMENTS_PER_WARP = 512


@triton.jit
def _store_quantized(
    value,  # fp32 [COLUMNS]
    dtype: tl.constexpr,  # that the value is rounded to first
    values,  # e4m3 [rows, WIDTH]
    scales,  # fp32 [rows]
    row,
    column,
    inside,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,  # of e4m3
    MIN_PEAK: tl.constexpr,
):
    value = value.to(dtype).to(tl.float32)
    peak = tl.max(tl.where(inside, tl.abs(value), 0.0), 0)
    peak = tl.maximum(peak, MIN_PEAK)
    # A NaN stays one, whatever the maximum makes of it; an infinity times 0 becomes one.
    scaled = value * tl.div_rn(LARGEST, peak)
    tl.store(values + row * WIDTH + column, scaled.to(tl.float8e4nv), mask=inside)
    tl.store(scales + row, peak * (1.0 / LARGEST))


# grid: [tokens]
@triton.jit
def _add_rms_norm_kernel(
    x,  # [tokens, WIDTH], contiguous
    residual,  # [tokens, WIDTH], contiguous, overwritten with the sum
    weight,  # [WIDTH]
    values,  # e4m3 [tokens, WIDTH], contiguous
    scales,  # fp32 [tokens]
    eps,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,  # WIDTH, rounded up to a power of two
    HAS_RESIDUAL: tl.constexpr,
    LARGEST: tl.constexpr,
    MIN_PEAK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    normed = add_and_normalize(
        x, residual, weight, row * WIDTH, column, inside, eps, WIDTH, HAS_RESIDUAL
    )
    _store_quantized(
        normed, x.dtype.element_ty, values, scales, row, column, inside, WIDTH, LARGEST, MIN_PEAK
    )


# grid: [tokens]
@triton.jit
def _silu_mul_kernel(
    gate_up,  # [tokens, 2 * WIDTH], contiguous
    values,  # e4m3 [tokens, WIDTH], contiguous
    scales,  # fp32 [tokens]
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,  # WIDTH, rounded up to a power of two
    LARGEST: tl.constexpr,
    MIN_PEAK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    gated = gate_with_silu(gate_up + row * 2 * WIDTH + column, inside, WIDTH)
    dtype = gate_up.dtype.element_ty
    _store_quantized(gated, dtype, values, scales, row, column, inside, WIDTH, LARGEST, MIN_PEAK)


# grid: [rows]
@triton.jit
def _quantize_rows_kernel(
    x,  # [rows, WIDTH], contiguous
    values,  # e4m3 [rows, WIDTH], contiguous
    scales,  # fp32 [rows]
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,  # WIDTH, rounded up to a power of two
    LARGEST: tl.constexpr,
    MIN_PEAK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    value = tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    _store_quantized(
        value, tl.float32, values, scales, row, column, inside, WIDTH, LARGEST, MIN_PEAK
    )


def add_rms_norm(
    x: torch.Tensor,  # [tokens, width], contiguous
    residual: torch.Tensor | None,  # [tokens, width], contiguous: becomes x + residual
    weight: torch.Tensor,  # [width]
    eps: float,
) -> Fp8Rows:  # [tokens, width]
    """RMSNorm of x + residual, or of x alone."""
    tokens, width = x.shape
    rows = _allocate_rows(x, width)
    _add_rms_norm_kernel[(tokens,)](
        x,
        x if residual is None else residual,
        weight,
        rows.values,
        rows.scales,
        eps,
        HAS_RESIDUAL=residual is not None,
        **_choose_options(width),
    )
    return rows


def silu_mul(
    gate_up: torch.Tensor,  # [tokens, 2 * width], contiguous
) -> Fp8Rows:  # [tokens, width]
    """SiLU of the first half times the second half."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    rows = _allocate_rows(gate_up, width)
    _silu_mul_kernel[(tokens,)](
        gate_up,
        rows.values,
        rows.scales,
        **_choose_options(width),
    )
    return rows


def quantize_rows(
    x: torch.Tensor,  # [rows, width], contiguous
) -> Fp8Rows:  # [rows, width]
    """Quantize each row by its largest magnitude."""
    tokens, width = x.shape
    rows = _allocate_rows(x, width)
    _quantize_rows_kernel[(tokens,)](
        x,
        rows.values,
        rows.scales,
        **_choose_options(width),
    )
    return rows


def _allocate_rows(x: torch.Tensor, width: int) -> Fp8Rows:
    return Fp8Rows(
        x.new_empty(len(x), width, dtype=E4M3), x.new_empty(len(x), 1, dtype=torch.float32)
    )


def _choose_options(width: int) -> dict[str, float]:
    """What all kernels of this file are compiled for."""
    columns = triton.next_power_of_2(width)
    return {
        "WIDTH": width,
        "COLUMNS": columns,
        "LARGEST": E4M3_MAX,
        "MIN_PEAK": MIN_PEAK,
        "num_warps": min(_MAX_WARPS, max(1, columns // _ELEMENTS_PER_WARP)),
    }
