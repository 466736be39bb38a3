"""RMSNorm, rotary embedding and SiLU gating in plain torch: the reference, run by every device."""

import math

import torch
import torch.nn.functional as F


class RMSNorm:
    """Root-mean-square normalisation (Zhang and Sennrich, 2019), in fp32.

    x / sqrt(mean(x^2) + eps) * w  =  x / hypot(|x|, sqrt(n eps)) * (sqrt(n) w): four native calls,
    where torch's own makes ten. The linear layer before it adds the residual, at no cost, in its
    epilogue.
    """

    def __init__(
        self,
        weight: torch.Tensor,  # [width], or [heads, width] with one weight per head
        eps: float,
    ) -> None:
        self.weight = weight
        width = weight.shape[-1]
        self._scaled_eps = torch.tensor(math.sqrt(width * eps), device=weight.device)
        self._weight = weight.to(torch.float32) * math.sqrt(width)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [tokens, *weight.shape] -> the same
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).hypot_(
            self._scaled_eps
        )
        return torch.div(x, length).mul_(self._weight).to(x.dtype)


def rotary_(
    x: torch.Tensor,  # [tokens, heads, dim], overwritten
    cos: torch.Tensor,  # [tokens, 1, dim], both halves equal
    sin: torch.Tensor,  # [tokens, 1, dim], the first half negated
) -> None:
    """Rotary position embedding (Su et al., 2021), dimension i paired with i + dim / 2."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(swapped, sin)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:  # [tokens, 2 * width] -> [tokens, width]
    """SiLU of the first half times the second half."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
