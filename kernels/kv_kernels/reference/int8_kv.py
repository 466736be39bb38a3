"""Keys and values in int8, in plain torch: the reference.

A row of the arena is what one head of K or V keeps of one token: its values in int8, as
`int8_linear.quantize_rows` computes them, and behind them their fp32 scale as 4 more int8 numbers.
So blocks are ranges of bytes, as with any other dtype, and are moved without a look at them. A
block of zero bytes has values 0. A row with a NaN or an infinity has a scale that is no finite
number, and becomes NaN when it is decoded.
"""

import torch

from kv_kernels.reference.int8_linear import quantize_rows

SCALE_BYTES = 4  # of one row
DIM_MULTIPLE = 4  # so that scales are aligned


def encode_rows(kv: torch.Tensor) -> torch.Tensor:  # [..., dim] -> int8 [..., dim + SCALE_BYTES]
    """Rows for the arena. `dim` has to be a multiple of DIM_MULTIPLE."""
    rows = quantize_rows(kv)
    return torch.cat([rows.values, rows.scales.view(torch.int8)], -1)


def decode_rows(
    rows: torch.Tensor,  # int8 [..., dim + SCALE_BYTES], contiguous
    dtype: torch.dtype,
) -> torch.Tensor:  # [..., dim]
    """Values times scale in fp32, rounded to `dtype`."""
    scales = rows.view(torch.float32)[..., -1:]
    return (rows[..., :-SCALE_BYTES].float() * scales).to(dtype)
