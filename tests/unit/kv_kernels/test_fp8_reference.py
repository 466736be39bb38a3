"""FP8 linear layers in torch, against products in fp32."""

import math

import pytest
import torch

from kv_kernels.reference import fp8
from kv_kernels.reference.fp8 import Fp8Linear, quantize_rows, quantize_weight


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("magnitude", [1e-30, 1e-11, 1.0, 1e30])
def test_largest_magnitude_of_a_row_becomes_the_largest_number(magnitude: float) -> None:
    x = draw(5, 48).clamp(-0.9, 0.9)
    x[:, 7] = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    rows = quantize_rows(x * magnitude)
    if magnitude < fp8.MIN_PEAK:
        assert not rows.values.float().any()
    else:
        assert rows.values[:, 7].tolist() == [448.0, -448.0, 448.0, -448.0, 448.0]
        assert torch.allclose(rows.scales, torch.tensor(magnitude / 448.0))


def test_rounding_error_is_half_a_step() -> None:
    x = draw(20, 300)
    rows = quantize_rows(x)
    bound = torch.maximum(x.abs() * 2.0**-4, rows.scales * 2.0**-10)
    assert bool(((rows.dequantize() - x).abs() <= bound * (1 + 1e-5)).all())


def test_row_of_zeros_stays_zero() -> None:
    x = draw(3, 16)
    x[1] = 0.0
    rows = quantize_rows(x)
    assert not rows.values[1].float().any()
    assert 0.0 < float(rows.scales[1]) < 1e-14
    assert not Fp8Linear(draw(32, 16))(x)[1].any()


@pytest.mark.parametrize("damage", [math.nan, math.inf, -math.inf])
def test_damaged_row_reaches_the_result(damage: float) -> None:
    x = draw(3, 16)
    x[1, 4] = damage
    finite = Fp8Linear(draw(32, 16))(x).isfinite()
    assert finite.any(1).tolist() == [True, False, True]


def test_damaged_weight_reaches_the_result() -> None:
    weight = draw(32, 16)
    weight[5, 3] = math.nan
    finite = Fp8Linear(weight)(draw(2, 16, seed=1)).isfinite()
    assert finite.all(0).tolist() == [feature != 5 for feature in range(32)]


def test_weights_are_quantized_by_feature_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = draw(50, 16)
    whole = quantize_rows(weight)
    monkeypatch.setattr(fp8, "_ROWS_AT_ONCE", 7)
    parts = quantize_weight(weight)
    assert torch.equal(parts.values.float(), whole.values.float())
    assert torch.equal(parts.scales, whole.scales)


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_is_near_that_of_unquantized_values(rows: int, dtype: torch.dtype) -> None:
    x, weight = draw(rows, 512).to(dtype), draw(64, 512, seed=1).to(dtype)
    bias, residual = draw(64, seed=2).to(dtype), draw(rows, 64, seed=3).to(dtype)
    y = Fp8Linear(weight, bias)(x, residual.clone())
    exact = x.float() @ weight.float().T + bias.float() + residual.float()
    assert y.dtype is dtype
    # A product of two numbers is off by 4% (root mean square) if each has 3 bits of mantissa.
    assert float((y.float() - exact).square().mean().sqrt()) < 0.05 * math.sqrt(512)


@pytest.mark.parametrize("shape", [(40, 64), (64, 40)])
def test_sizes_that_are_not_multiples_of_16_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"\(\d+, \d+\) has no fp8 product.* multiples of 16"):
        Fp8Linear(draw(*shape))
