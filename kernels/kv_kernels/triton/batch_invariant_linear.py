"""Linear layers in Triton whose result for a row does not depend on the other rows.

Libraries choose another algorithm, and so another order of the sum, for another number of rows.
Here tiles and the order over the inner dimension depend on the weight alone ("batch-invariant",
Thinking Machines, 2025). `PlainLinear` in reference/linear.py computes the same in torch.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl

_ROWS = 64  # of a tile; the least that the tensor cores of a Hopper GPU take
_WIDE_OUT = 1 << 13  # outputs from which there are enough tiles of 128 columns to keep a GPU busy
_ROW_TILES_IN_GROUP = 8  # that are computed next to each other, so that the L2 cache has the weight


# grid: [tiles of rows * tiles of columns]. One binary serves every number of rows.
@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x,  # [rows, in_width], contiguous
    weight,  # [out_width, in_width], contiguous
    bias,  # [out_width], or anything without a bias
    out,  # [rows, out_width], contiguous
    rows,
    out_width,
    in_width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,  # inner dimension of one step
    IN_GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,  # multiply in fp32: the interpreter's bf16 arithmetic is wrong
):
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(out_width, COLUMNS)
    per_group = IN_GROUP * column_tiles
    group, place = tl.program_id(0) // per_group, tl.program_id(0) % per_group
    first = group * IN_GROUP
    in_group = tl.minimum(row_tiles - first, IN_GROUP)
    row = (first + place % in_group) * ROWS + tl.arange(0, ROWS)
    column = place // in_group * COLUMNS + tl.arange(0, COLUMNS)
    row_ok, column_ok = (row < rows)[:, None], (column < out_width)[:, None]
    depth = tl.arange(0, DEPTH)
    x_cells = x + row.to(tl.int64)[:, None] * in_width + depth[None, :]
    weight_cells = weight + column.to(tl.int64)[:, None] * in_width + depth[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, in_width, DEPTH):
        inside = (begin + depth < in_width)[None, :]
        left = tl.load(x_cells + begin, mask=row_ok & inside, other=0.0)
        right = tl.load(weight_cells + begin, mask=column_ok & inside, other=0.0)
        if UPCAST:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    if HAS_BIAS:
        added = tl.load(bias + column, mask=column < out_width, other=0.0).to(tl.float32)
        total += added[None, :]
    cells = out + row.to(tl.int64)[:, None] * out_width + column[None, :]
    tl.store(cells, total.to(out.dtype.element_ty), mask=row_ok & (column < out_width)[None, :])


class BatchInvariantLinear:
    """A `Linear` that multiplies with the weight as it is stored."""

    def __init__(
        self,
        weight: torch.Tensor,  # [out, in]
        bias: torch.Tensor | None,  # [out]
        *,
        upcast: bool = False,  # for Triton's interpreter
    ) -> None:
        self._weight, self._bias, self._upcast = weight.contiguous(), bias, upcast
        self._columns = 128 if len(weight) >= _WIDE_OUT else 64
        self._depth = 32 if weight.dtype is torch.float32 else 64

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        x = x.contiguous()
        rows, (out_width, in_width) = len(x), self._weight.shape
        out = x.new_empty(rows, out_width)
        grid = (triton.cdiv(rows, _ROWS) * triton.cdiv(out_width, self._columns),)
        _linear_kernel[grid](
            x,
            self._weight,
            self._weight if self._bias is None else self._bias,
            out,
            rows,
            out_width,
            in_width,
            ROWS=_ROWS,
            COLUMNS=self._columns,
            DEPTH=self._depth,
            IN_GROUP=_ROW_TILES_IN_GROUP,
            HAS_BIAS=self._bias is not None,
            UPCAST=self._upcast,
            num_warps=4,
            num_stages=3,
        )
        return out if residual is None else out.add_(residual)
