"""Products of e4m3 rows with e4m3 weights, accumulated in fp32, on an NVIDIA GPU.

A step of few rows is bound by reading the weight. A program reads a tile of its output features
over the whole width, or over one of several equal parts of it; a second kernel then adds the parts
up, always in the same order. The grid depends on nothing but the weight's shape and the number of
rows, so that a step can be captured in a graph. Many rows are multiplied by torch's own kernel.
`reference/fp8.py` computes the same in torch.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kv_kernels.reference.fp8 import Fp8Linear, Fp8Rows
from kv_kernels.triton import fp8_layer_ops
from kv_kernels.triton.row_linear import multiply_row

FEW_ROWS = 64  # up to so many rows are multiplied by the kernel of this file
# Whether torch's kernel sums up in the tensor cores' registers, with about 14 bits.
USE_FAST_ACCUMULATION = True
_TARGET_PROGRAMS = 120  # of one launch, at least: nearly as many as an H200 has multiprocessors
_MIN_SPLIT_WIDTH = 4096  # columns of the weight that a program reads at least
_DOT_ROWS = 16  # the fewest rows that tl.dot takes
# Output features of a program: what Hopper's fastest products take from the left.
_TILE_FEATURES = 64
_COMBINE_BLOCK = 256  # output features that one program of the second kernel adds up


@dataclass(frozen=True, slots=True)
class FewRowsPlan:
    """How a weight is divided among programs."""

    columns: int  # of the weight, read at a time
    splits: int = 1  # programs that share the width of a tile
    stages: int = 4  # tiles in flight
    rows: int | None = None  # of a program; None: all rows of a step

    @staticmethod
    def choose(features: int, width: int) -> "FewRowsPlan":
        """The plan for a weight [features, width]."""
        programs, splits = -(-features // _TILE_FEATURES), 1
        if programs >= 3 * _TARGET_PROGRAMS:  # they share multiprocessors: latency is hidden
            return FewRowsPlan(columns=128, stages=3)
        while programs * splits < _TARGET_PROGRAMS and width >= 2 * splits * _MIN_SPLIT_WIDTH:
            splits *= 2
        return FewRowsPlan(columns=256, splits=splits, stages=6)


# grid: [tiles of features, splits, tiles of rows]
@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x,  # e4m3 [rows, WIDTH], contiguous
    x_scales,  # fp32 [rows]
    weight,  # e4m3 [features, WIDTH], contiguous
    weight_scales,  # fp32 [features]
    bias,  # [features], or anything without a bias
    out,  # [rows, features], or with several splits fp32 [splits, rows, features], unscaled
    rows,
    features,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,  # of a program
    FEATURES: tl.constexpr,  # of a program
    COLUMNS: tl.constexpr,  # read at a time
    HAS_BIAS: tl.constexpr,
):
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    row, column = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    feature_ok, row_ok = feature < features, row < rows
    per_split: tl.constexpr = (WIDTH + SPLITS * COLUMNS - 1) // (SPLITS * COLUMNS) * COLUMNS
    first = tl.program_id(1) * per_split
    w_cells = weight + feature.to(tl.int64)[:, None] * WIDTH + first + column[None, :]
    x_cells = x + row.to(tl.int64)[:, None] * WIDTH + first + column[None, :]
    total = tl.zeros([FEATURES, ROWS], tl.float32)
    for begin in range(0, per_split, COLUMNS):
        if WIDTH % (SPLITS * COLUMNS) == 0:
            w = tl.load(w_cells + begin, mask=feature_ok[:, None], other=0.0)
            part = tl.load(x_cells + begin, mask=row_ok[:, None], other=0.0)
        else:
            column_ok = (first + begin + column < WIDTH)[None, :]
            w = tl.load(w_cells + begin, mask=feature_ok[:, None] & column_ok, other=0.0)
            part = tl.load(x_cells + begin, mask=row_ok[:, None] & column_ok, other=0.0)
        total = tl.dot(w, tl.trans(part), total, max_num_imprecise_acc=COLUMNS)
    total = tl.trans(total)
    cells_ok = row_ok[:, None] & feature_ok[None, :]
    cells = row.to(tl.int64)[:, None] * features + feature[None, :]
    if SPLITS == 1:
        scale = tl.load(x_scales + row, mask=row_ok, other=0.0)[:, None]
        total = total * scale * tl.load(weight_scales + feature, mask=feature_ok)[None, :]
        if HAS_BIAS:
            total += tl.load(bias + feature, mask=feature_ok).to(tl.float32)[None, :]
        tl.store(out + cells, total.to(out.dtype.element_ty), mask=cells_ok)
    else:
        split = tl.program_id(1).to(tl.int64) * rows * features
        tl.store(out + split + cells, total, mask=cells_ok)


# grid: [rows, tiles of features]
@triton.jit
def _combine_kernel(
    sums,  # fp32 [SPLITS, rows, features]
    x_scales,  # fp32 [rows]
    weight_scales,  # fp32 [features]
    bias,  # [features], or anything without a bias
    out,  # [rows, features], contiguous
    features,
    SPLITS: tl.constexpr,
    FEATURES: tl.constexpr,  # of a program
    HAS_BIAS: tl.constexpr,
):
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    inside = feature < features
    cells = sums + row * features + feature
    total = tl.load(cells, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(cells + split * rows * features, mask=inside, other=0.0)
    total = total * tl.load(x_scales + row) * tl.load(weight_scales + feature, mask=inside)
    if HAS_BIAS:
        total += tl.load(bias + feature, mask=inside).to(tl.float32)
    tl.store(out + row * features + feature, total.to(out.dtype.element_ty), mask=inside)


def multiply_few_rows(
    x: Fp8Rows,  # [rows, in]
    weight: Fp8Rows,  # [out, in]
    bias: torch.Tensor | None,  # [out]
    dtype: torch.dtype,
    plan: FewRowsPlan,
) -> torch.Tensor:  # [rows, out]
    """x W^T + bias in `dtype`."""
    (rows, width), features = x.values.shape, len(weight.values)
    out = x.scales.new_empty(rows, features, dtype=dtype)
    sums = x.scales.new_empty(plan.splits, rows, features) if plan.splits > 1 else out
    tile = plan.rows or max(_DOT_ROWS, triton.next_power_of_2(rows))
    grid = triton.cdiv(features, _TILE_FEATURES), plan.splits, triton.cdiv(rows, tile)
    _few_rows_kernel[grid](
        x.values,
        x.scales,
        weight.values,
        weight.scales,
        weight.scales if bias is None else bias,
        sums,
        rows,
        features,
        WIDTH=width,
        SPLITS=plan.splits,
        ROWS=tile,
        FEATURES=_TILE_FEATURES,
        COLUMNS=plan.columns,
        HAS_BIAS=bias is not None,
        num_warps=4,
        num_stages=plan.stages,
    )
    if plan.splits > 1:
        _combine_kernel[(rows, triton.cdiv(features, _COMBINE_BLOCK))](
            sums,
            x.scales,
            weight.scales,
            weight.scales if bias is None else bias,
            out,
            features,
            SPLITS=plan.splits,
            FEATURES=_COMBINE_BLOCK,
            HAS_BIAS=bias is not None,
            num_warps=1,
        )
    return out


def multiply_many_rows(
    x: Fp8Rows,  # [rows, in]
    weight: Fp8Rows,  # [out, in]
    bias: torch.Tensor | None,  # [out]
    dtype: torch.dtype,  # bf16 on a GPU
) -> torch.Tensor:  # [rows, out]
    """x W^T + bias in `dtype`, by torch's own kernel."""
    product = torch._scaled_mm(
        x.values,
        weight.values.t(),
        scale_a=x.scales,
        scale_b=weight.scales.t(),
        out_dtype=dtype,
        use_fast_accum=USE_FAST_ACCUMULATION,
    )
    # cuBLAS has no kernel for scales of rows and a bias at some widths.
    return product if bias is None else product.add_(bias)


class TritonFp8Linear(Fp8Linear):
    """An `Fp8Linear` on a GPU."""

    quantize = staticmethod(fp8_layer_ops.quantize_rows)

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self._plan = FewRowsPlan.choose(*weight.shape)

    def multiply(self, rows: Fp8Rows) -> torch.Tensor:  # [tokens, in] -> [tokens, out]
        weight, bias, dtype = self._weight, self._bias, self._dtype
        if len(rows.values) == 1:
            scales = rows.scales, weight.scales
            return multiply_row(rows.values, weight.values, bias, scales=scales, dtype=dtype)
        if len(rows.values) <= FEW_ROWS:
            return multiply_few_rows(rows, weight, bias, dtype, self._plan)
        return multiply_many_rows(rows, weight, bias, dtype)


class BatchInvariantFp8Linear(TritonFp8Linear):
    """An `Fp8Linear` whose result for a row does not depend on the other rows: one kernel for all.

    Tiles and the order of the sum are the same for every number of rows.
    """

    _PLAN = FewRowsPlan(columns=128, rows=64)

    def multiply(self, rows: Fp8Rows) -> torch.Tensor:  # [tokens, in] -> [tokens, out]
        return multiply_few_rows(rows, self._weight, self._bias, self._dtype, self._PLAN)
