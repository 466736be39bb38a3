"""Linear layers in int8 (W8A8), in plain torch: the reference, and what a CPU can run.

A weight has one scale for each output feature, fixed when it is loaded; activations have one for
each row, computed in every step. Both are symmetric: there is no zero point, and -128 is not used.
A native kernel has to compute the integers below bit for bit; the rest are fp32 operations.

    peak    = max(MIN_PEAK, largest magnitude of the row in fp32)
    values  = round(row * (127 / peak))                  to the nearest integer, halves to even
    scale   = peak / 127
    sum     = sum over the width of values * weight values                        exact, in int32
    result  = fp32(sum) * row scale * weight scale (+ bias) (+ residual)     from left to right,
                                                         rounded once to the dtype of the layer

A row with a NaN or an infinity has values 0 and a scale that is no finite number, so that its row
of the product is NaN.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

INT8_MAX = 127
MIN_PEAK = 1e-12  # a row whose magnitudes are all below this, such as zeros, is scaled as by this
MAX_WIDTH = (2**31 - 1) // INT8_MAX**2  # of a row: longer sums could leave the range of int32
_EXACT_FP32_WIDTH = 2**24 // INT8_MAX**2  # sums of so many products are exact in fp32
_ROWS_AT_ONCE = 4096  # of a weight, in fp32 while it is quantized
_PROBED_ROWS = (1, 2, 8, 33)
_PROBED_WEIGHTS = ((5, 7), (33, 64), (64, 256))  # [out, in]
_TIMED_SIZES = (64, 256), (512, 256)  # of rows and of a weight
_TIMED_PRODUCTS = 3


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Rows in int8, which stand for values * scales."""

    values: torch.Tensor  # int8 [..., width], contiguous
    scales: torch.Tensor  # fp32 [..., 1]

    def dequantize(self) -> torch.Tensor:
        """The rows in fp32."""
        return self.values.float() * self.scales


def quantize_rows(x: torch.Tensor) -> Int8Rows:  # [..., width]
    """Quantize each row by its largest magnitude."""
    wide = x.float()
    peak = wide.abs().amax(-1, keepdim=True).clamp_min(MIN_PEAK)
    inverse = torch.full_like(peak, INT8_MAX) / peak  # 127 / peak would be 127 * (1 / peak)
    values = (wide * inverse).round_().nan_to_num_(0.0)
    return Int8Rows(values.masked_fill_(~peak.isfinite(), 0.0).to(torch.int8), peak / INT8_MAX)


def quantize_weight(weight: torch.Tensor) -> Int8Rows:  # [out, in]
    """Quantize each output feature, a bounded number of them at a time."""
    parts = [quantize_rows(part) for part in weight.split(_ROWS_AT_ONCE)]
    return Int8Rows(
        torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts])
    )


def multiply_exactly(
    x: torch.Tensor,  # int8 [rows, width], width up to MAX_WIDTH
    weight: torch.Tensor,  # int8 [out, width]
) -> torch.Tensor:  # int32 [rows, out]
    """The exact product x W^T.

    oneDNN's product is exact and fast where the processor has instructions for it (VNNI). On others
    its 16-bit sums saturate, or torch multiplies one number at a time, so that products in fp32 are
    used. So they are for a width of 1, where torch 2.13 returns uninitialized memory.
    """
    product: torch.Tensor
    if x.shape[1] > 1 and _has_exact_int8_products() and _has_fast_int8_products():
        product = torch._int_mm(x, weight.T)
    else:
        product = multiply_in_fp32(x, weight)
    return product


def multiply_in_fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same product, as exact products in fp32 of a bounded width."""
    product = torch.zeros(len(x), len(weight), dtype=torch.int32, device=x.device)
    for begin in range(0, x.shape[1], _EXACT_FP32_WIDTH):
        part = slice(begin, begin + _EXACT_FP32_WIDTH)
        product += (x[:, part].float() @ weight[:, part].float().T).to(torch.int32)
    return product


@cache
def _has_exact_int8_products() -> bool:
    """Whether torch's product of int8 matrices is exact on this processor."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        values = torch.randint(-INT8_MAX, INT8_MAX + 1, shape, generator=generator)
        return values.to(torch.int8)

    def largest(*shape: int) -> torch.Tensor:
        return torch.full(shape, INT8_MAX, dtype=torch.int8)

    for rows in _PROBED_ROWS:
        for features, width in _PROBED_WEIGHTS:
            weights = draw(features, width), largest(features, width), -largest(features, width)
            for x in (draw(rows, width), largest(rows, width)):
                for weight in weights:
                    if not torch.equal(torch._int_mm(x, weight.T), multiply_in_fp32(x, weight)):
                        return False
    return True


@cache
def _has_fast_int8_products() -> bool:
    """Whether torch multiplies int8 matrices in at most twice the time that fp32 takes.

    Measured once a process: it depends on the processor and on the build of torch. Both products
    are exact, so that the answer changes no result.
    """
    x, weight = (torch.ones(size, dtype=torch.int8) for size in _TIMED_SIZES)

    def measure_seconds(multiply: Callable[[], torch.Tensor]) -> float:
        times = []
        for _ in range(_TIMED_PRODUCTS):
            begin = time.perf_counter()
            multiply()
            times.append(time.perf_counter() - begin)
        return min(times)

    fp32_seconds = measure_seconds(lambda: multiply_in_fp32(x, weight))
    return measure_seconds(lambda: torch._int_mm(x, weight.T)) <= 2 * fp32_seconds


class Int8Linear:
    """A `Linear` with weight and activations in int8."""

    def __init__(
        self,
        weight: torch.Tensor,  # [out, in], in up to MAX_WIDTH
        bias: torch.Tensor | None = None,  # [out]
    ) -> None:
        """Raises ValueError for a weight that is too wide."""
        if weight.shape[1] > MAX_WIDTH:
            raise ValueError(
                f"a weight {tuple(weight.shape)} has no int8 product: its width has to be"
                f" {MAX_WIDTH} at most"
            )
        self._dtype = weight.dtype
        rows = quantize_weight(weight)
        self._values = rows.values
        self._scales = rows.scales.T  # [1, out]
        self._bias = None if bias is None else bias.float()

    def __call__(
        self,
        x: torch.Tensor,  # [tokens, in]
        residual: torch.Tensor | None = None,  # [tokens, out]
    ) -> torch.Tensor:  # [tokens, out]
        rows = quantize_rows(x)
        y = multiply_exactly(rows.values, self._values).float()
        y.mul_(rows.scales).mul_(self._scales)
        if self._bias is not None:
            y.add_(self._bias)
        if residual is not None:
            y.add_(residual)
        return y.to(self._dtype)
