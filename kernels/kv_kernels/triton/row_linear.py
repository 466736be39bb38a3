"""The product of one row with a weight, in Triton: what a decode step of one sequence consists of.

It is bound by reading the weight, once and in order. A program computes a few output features over
the whole width; more rows are multiplied by cuBLAS. `reference/linear.py` computes the same.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl

from kv_kernels.reference.linear import PlainLinear

_WIDE = 8192  # columns from which on tiles of more features and fewer columns are faster
_WARPS = 8


# grid: [features / FEATURES]
@triton.jit
def _row_product_kernel(
    x,  # [WIDTH]
    weight,  # [features, WIDTH], contiguous
    bias,  # [features], or anything without a bias
    out,  # [features]
    features,
    WIDTH: tl.constexpr,
    FEATURES: tl.constexpr,  # of a program
    COLUMNS: tl.constexpr,  # read at a time
    HAS_BIAS: tl.constexpr,
):
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    column = tl.arange(0, COLUMNS)
    feature_ok = feature < features
    cells = weight + feature.to(tl.int64)[:, None] * WIDTH + column[None, :]
    total = tl.zeros([FEATURES, COLUMNS], tl.float32)
    for begin in range(0, WIDTH, COLUMNS):
        if WIDTH % COLUMNS == 0:
            w = tl.load(cells + begin, mask=feature_ok[:, None], other=0.0)
            part = tl.load(x + begin + column)
        else:
            column_ok = begin + column < WIDTH
            w = tl.load(cells + begin, mask=feature_ok[:, None] & column_ok[None, :], other=0.0)
            part = tl.load(x + begin + column, mask=column_ok, other=0.0)
        total += w.to(tl.float32) * part.to(tl.float32)[None, :]
    product = tl.sum(total, 1)
    if HAS_BIAS:
        product += tl.load(bias + feature, mask=feature_ok, other=0.0).to(tl.float32)
    tl.store(out + feature, product.to(out.dtype.element_ty), mask=feature_ok)


def multiply_row(
    x: torch.Tensor,  # [1, in], contiguous
    weight: torch.Tensor,  # [out, in], contiguous
    bias: torch.Tensor | None,  # [out]
) -> torch.Tensor:  # [1, out]
    """x W^T + bias."""
    features, width = weight.shape
    out = x.new_empty(1, features)
    columns = min(512 if width >= _WIDE else 2048, triton.next_power_of_2(width))
    rows = 8 if width >= _WIDE else 4
    _row_product_kernel[(triton.cdiv(features, rows),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        features,
        WIDTH=width,
        FEATURES=rows,
        COLUMNS=columns,
        HAS_BIAS=bias is not None,
        num_warps=_WARPS,
    )
    return out


class CudaLinear(PlainLinear):
    """Multiplies one row by the kernel of this file, and more rows by cuBLAS."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if len(x) != 1 or residual is not None:
            return super().__call__(x, residual)
        return multiply_row(x, self._weight, self._bias)
