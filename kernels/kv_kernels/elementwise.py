"""RMSNorm, rotary embedding and SiLU-gating as plain torch: the oracle, and the path of the CPU."""

import torch
import torch.nn.functional as F


def rms_norm(
    x: torch.Tensor,  # [tokens, hidden]
    weight: torch.Tensor,  # [hidden]
    eps: float,
) -> torch.Tensor:  # [tokens, hidden]
    """Root-mean-square normalisation (Zhang and Sennrich, 2019), the mean of squares in fp32.

    `vector_norm` reduces without an fp32 copy of `x`; torch's own `rms_norm` is ten times slower on the CPU in bf16.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(x, scale).to(x.dtype).mul_(weight)


def rotary(
    x: torch.Tensor,  # [tokens, heads, dim]
    cos: torch.Tensor,  # [tokens, 1, dim], each half the same
    sin: torch.Tensor,  # [tokens, 1, dim // 2]
) -> torch.Tensor:  # [tokens, heads, dim]
    """Rotary position embedding (Su et al., 2021), dimension i paired with i + dim / 2."""
    out = x * cos
    low, high = x.chunk(2, -1)
    out_low, out_high = out.chunk(2, -1)
    out_low.addcmul_(high, sin, value=-1)
    out_high.addcmul_(low, sin)
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:  # [tokens, 2 * width] -> [tokens, width]
    """SiLU of the first half times the second half."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
