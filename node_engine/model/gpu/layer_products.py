"""Matrix products of a layer on a GPU, each with the operation that produces its input.

In FP8 that operation also quantizes, so that a product has few launches and reads half the bytes.
"""

from typing import Protocol

import torch

from baton.models.model_identity import FP8, Quantization
from kv_kernels.reference.fp8 import Fp8Linear
from kv_kernels.reference.linear import Linear
from kv_kernels.triton import fp8_layer_ops, layer_ops


class LayerProducts(Protocol):
    """Inputs and outputs are in the model's dtype."""

    def multiply_normed(
        self,
        linear: Linear,
        x: torch.Tensor,  # [tokens, in], contiguous
        residual: torch.Tensor | None,  # [tokens, in]: becomes x + residual
        norm_weight: torch.Tensor,  # [in]
        eps: float,
    ) -> torch.Tensor:  # [tokens, out]
        """Multiply the RMSNorm of x + residual, or of x alone, by the weight of `linear`."""

    def multiply_gated(
        self,
        linear: Linear,
        gate_up: torch.Tensor,  # [tokens, 2 * in], contiguous
    ) -> torch.Tensor:  # [tokens, out]
        """Multiply SiLU(gate) * up, the halves of each row, by the weight of `linear`."""


class PlainProducts:
    """`LayerProducts` in the model's dtype."""

    def multiply_normed(
        self,
        linear: Linear,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        return linear(layer_ops.add_rms_norm(x, residual, norm_weight, eps))

    def multiply_gated(self, linear: Linear, gate_up: torch.Tensor) -> torch.Tensor:
        return linear(layer_ops.silu_mul(gate_up))


class Fp8Products:
    """`LayerProducts` of an `Fp8Linear`."""

    def multiply_normed(
        self,
        linear: Linear,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        assert isinstance(linear, Fp8Linear)
        return linear.multiply(fp8_layer_ops.add_rms_norm(x, residual, norm_weight, eps))

    def multiply_gated(self, linear: Linear, gate_up: torch.Tensor) -> torch.Tensor:
        assert isinstance(linear, Fp8Linear)
        return linear.multiply(fp8_layer_ops.silu_mul(gate_up))


def choose_layer_products(quantization: Quantization) -> LayerProducts:
    return Fp8Products() if quantization == FP8 else PlainProducts()
