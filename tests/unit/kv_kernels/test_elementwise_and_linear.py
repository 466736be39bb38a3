"""RMSNorm, rotary embedding, SiLU gating and linear layers, compared with their definitions."""

import pytest
import torch

from kv_kernels.reference.elementwise import RMSNorm, rotary_, silu_mul
from kv_kernels.reference.linear import (
    MIN_PACKED_FP32_WEIGHTS,
    PackedLinear,
    PlainLinear,
    make_cpu_linear,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-4, 1.0, 100.0])
def test_rms_norm_is_its_definition(dtype: torch.dtype, size: float) -> None:
    x, weight, eps = (normal(5, 48) * size).to(dtype), normal(48, dtype=dtype, seed=1), 1e-5
    exact = (
        x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps) * weight.double()
    )
    result = RMSNorm(weight, eps)(x)
    assert result.dtype is dtype
    torch.testing.assert_close(result.double(), exact, atol=1e-6, rtol=TOLERANCE[dtype])


def test_rotary_turns_pairs_by_their_angle() -> None:
    x = normal(3, 4, 16)
    angle = normal(3, 1, 8, seed=1)
    cos, sin = angle.cos(), angle.sin()
    pairs = torch.complex(x[..., :8], x[..., 8:]) * torch.complex(cos, sin)
    view = torch.cat((x, x), 1)[:, :4]  # rows are not adjacent
    rotary_(view, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    torch.testing.assert_close(view, torch.cat((pairs.real, pairs.imag), -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_mul_gates_the_second_half(dtype: torch.dtype) -> None:
    x = normal(4, 20, dtype=dtype)
    gate, up = x.double().chunk(2, -1)
    torch.testing.assert_close(
        silu_mul(x).double(),
        gate * gate.sigmoid() * up,
        atol=TOLERANCE[dtype],
        rtol=TOLERANCE[dtype],
    )


@pytest.mark.parametrize(
    "kind",
    [
        PlainLinear,
        pytest.param(
            PackedLinear,
            marks=pytest.mark.skipif(
                not torch.backends.mkldnn.is_available(), reason="torch without oneDNN"
            ),
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_linear_with_bias_and_residual(
    kind: type[PlainLinear | PackedLinear], dtype: torch.dtype, tokens: int
) -> None:
    if kind is PackedLinear and dtype is torch.bfloat16:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            pytest.skip("oneDNN has no products in bfloat16 for this CPU")
    weight, bias = normal(24, 40, dtype=dtype) / 8, normal(24, dtype=dtype, seed=1)
    x, residual = normal(tokens, 40, dtype=dtype, seed=2), normal(tokens, 24, dtype=dtype, seed=3)
    kept = residual.clone()
    exact = x.double() @ weight.double().T
    for linear, expected in (
        (kind(weight, None), exact),
        (kind(weight, bias), exact + bias.double()),
    ):
        torch.testing.assert_close(
            linear(x).double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )
        added = linear(x, residual).double()
        torch.testing.assert_close(
            added, expected + kept.double(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )
    assert torch.equal(residual, kept)


def test_small_fp32_weights_stay_plain_and_large_ones_are_packed() -> None:
    small, large = torch.zeros(4, 4), torch.zeros(MIN_PACKED_FP32_WEIGHTS // 64, 64)
    assert isinstance(make_cpu_linear(small, None), PlainLinear)
    assert isinstance(make_cpu_linear(large, None), PackedLinear)
