"""Linear layers whose weight is packed once, at load."""

from typing import Protocol

import torch
import torch.nn.functional as F

# Below this many weights, oneDNN's fixed cost per call outweighs its faster product in fp32 (see
# kernels/README.md).
MIN_PACKED_FP32_WEIGHTS = 1 << 17


class Linear(Protocol):
    """y = x W^T (+ bias) (+ residual)."""

    def __call__(
        self,
        x: torch.Tensor,  # [tokens, in]
        residual: torch.Tensor | None = None,  # [tokens, out]
    ) -> torch.Tensor: ...  # [tokens, out]


class PlainLinear:
    """Multiplies with the weight as it is stored."""

    def __init__(
        self,
        weight: torch.Tensor,  # [out, in]
        bias: torch.Tensor | None,  # [out]
    ) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y = F.linear(x, self._weight, self._bias)
        return y if residual is None else y.add_(residual)


class PackedLinear:
    """Multiplies with oneDNN's blocked weight format, packed once.

    torch's own bf16 linear packs the weight again at every call."""

    def __init__(
        self,
        weight: torch.Tensor,  # [out, in]
        bias: torch.Tensor | None,  # [out]
    ) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = bias

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor
        if residual is None:
            y = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        else:
            y = torch.ops.mkldnn._linear_pointwise.binary(
                x, residual, self._weight, self._bias, "add"
            )
        return y


def make_cpu_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """A PackedLinear or a PlainLinear, whichever is faster for this weight on this processor."""
    if not torch.backends.mkldnn.is_available():
        return PlainLinear(weight, bias)
    if weight.dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return PackedLinear(weight, bias)
    if weight.dtype is torch.float32 and weight.numel() >= MIN_PACKED_FP32_WEIGHTS:
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)
