"""Linear layers in FP8 (e4m3: 4 bits of exponent, 3 of mantissa), in plain torch: the reference.

A weight has one scale for each output feature, fixed when it is loaded; activations have one for
each row, computed in every step (Micikevicius et al., "FP8 formats for deep learning", 2022). The
largest magnitude of a row becomes 448, the largest number of e4m3.
"""

from dataclasses import dataclass

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
MIN_PEAK = 1e-12  # a row whose magnitudes are all below this, such as zeros, is scaled as by this
WIDTH_MULTIPLE = 16  # tensor cores multiply so many columns at a time, and features too
_ROWS_AT_ONCE = 4096  # of a weight, in fp32 while it is quantized


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Rows in e4m3, which stand for values * scales."""

    values: torch.Tensor  # e4m3 [rows, width], contiguous
    scales: torch.Tensor  # fp32 [rows, 1]

    def dequantize(self) -> torch.Tensor:
        """The rows in fp32."""
        return self.values.float() * self.scales


def quantize_rows(x: torch.Tensor) -> Fp8Rows:  # [rows, width]
    """Quantize each row by its largest magnitude. A row with a NaN or an infinity gets a NaN."""
    wide = x.float()
    peak = wide.abs().amax(1, keepdim=True).clamp_min(MIN_PEAK)
    inverse = torch.full_like(peak, E4M3_MAX) / peak
    return Fp8Rows((wide * inverse).to(E4M3), peak * (1.0 / E4M3_MAX))


def quantize_weight(weight: torch.Tensor) -> Fp8Rows:  # [out, in]
    """Quantize each output feature, a bounded number of them at a time."""
    parts = [quantize_rows(part) for part in weight.split(_ROWS_AT_ONCE)]
    return Fp8Rows(
        torch.cat([part.values.view(torch.uint8) for part in parts]).view(E4M3),
        torch.cat([part.scales for part in parts]),
    )


class Fp8Linear:
    """A `Linear` with weight and activations in e4m3."""

    def __init__(
        self,
        weight: torch.Tensor,  # [out, in], both multiples of WIDTH_MULTIPLE
        bias: torch.Tensor | None = None,  # [out]
    ) -> None:
        """Raises ValueError for a weight of another shape."""
        if any(size % WIDTH_MULTIPLE for size in weight.shape):
            raise ValueError(
                f"a weight {tuple(weight.shape)} has no fp8 product: both sizes have to be"
                f" multiples of {WIDTH_MULTIPLE}"
            )
        self._dtype = weight.dtype
        self._weight = quantize_weight(weight)
        self._bias = bias

    def __call__(
        self,
        x: torch.Tensor,  # [tokens, in]
        residual: torch.Tensor | None = None,  # [tokens, out]
    ) -> torch.Tensor:  # [tokens, out]
        y = self.multiply(self.quantize(x))
        return y if residual is None else y.add_(residual)

    def quantize(self, x: torch.Tensor) -> Fp8Rows:
        return quantize_rows(x)

    def multiply(self, rows: Fp8Rows) -> torch.Tensor:  # [tokens, in] -> [tokens, out]
        """The product with rows that are quantized already, in the weight's own dtype."""
        y = rows.values.float() @ self._weight.values.float().T
        y = y * rows.scales * self._weight.scales.T
        return (y if self._bias is None else y + self._bias.float()).to(self._dtype)
